"""What each trainer's loader reads of a conversation.

Read from the sources named with each, late in 2026, and tried with the releases of SpecForge 0.2,
Speculators 0.9, ModelOpt 0.47 and NeMo AutoModel 0.7.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from sfdd.errors import UsageError


class Order(Enum):
    """Which turns may follow which; a trainer would cut or refuse what has another order."""

    ANY = "any"
    ANSWERS = "answers"  # the user begins, and every answer follows the user
    ALTERNATING = "alternating"  # user, assistant, user …


_PLAIN = {"system": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class TextForm:
    """How turns are written.

    Attributes:
        turns: the key of the list of turns.
        role, content: the keys of a turn.
        roles: what the trainer calls the roles that it knows.
        order: which turns may follow which.
        reasoning: whether it reads `reasoning_content` beside the content. No text form has tool calls:
            where loaders pass them on, arguments, names or ids of results get lost on the way.
        suffix: of the file.
    """

    turns: str
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = field(default_factory=lambda: _PLAIN)
    order: Order = Order.ANY
    reasoning: bool = False
    suffix: str = ".jsonl"


@dataclass(frozen=True)
class Trainer:
    """A trainer of drafters.

    Attributes:
        name: as its authors write it.
        text: how it reads what is said.
        hand_over: the setting of the trainer that takes the file, `{}`, by form. The first form is what
            it reads best; `tokens` are `input_ids` and `loss_mask`, for those that take them.
    """

    name: str
    text: TextForm
    hand_over: Mapping[str, str]

    def chosen(self, form: str | None) -> str:
        """The form to write; raises UsageError where the trainer does not read the one asked for."""
        if form and form not in self.hand_over:
            raise UsageError(
                f"{self.name} takes conversations, not tokens: leave --form out, or give --for "
                "specforge or speculators."
            )
        return form or next(iter(self.hand_over))


TRAINERS: Mapping[str, Trainer] = {
    # eagle/traineagle3/main.py and eagle/ge_data: load_dataset("json"), columns id and conversations. Any
    # role but human and gpt is a KeyError, another order an AssertionError; the system prompt is its own.
    "eagle": Trainer(
        "EAGLE",
        TextForm(
            turns="conversations",
            role="from",
            content="value",
            roles={"user": "human", "assistant": "gpt"},
            order=Order.ALTERNATING,
        ),
        hand_over={"text": "main.py --trainpath {}"},
    ),
    # specforge/data/parse.py keeps role, content and tool_calls of a turn, and cuts a conversation before
    # an answer that follows no user; specforge/data/prompt_builder.py (0.2) takes token ids as they are.
    "specforge": Trainer(
        "SpecForge",
        TextForm(turns="conversations", order=Order.ANSWERS),
        hand_over={"text": "data.train_data_path: {}", "tokens": "data.prompts_path: {}"},
    ),
    # speculators/data_generation/preprocessing.py passes tokens through; conversations need a vLLM server
    # that renders them, a row per answer. It takes a role that it does not know for the assistant.
    "speculators": Trainer(
        "Speculators",
        TextForm(turns="conversations", reasoning=True),
        hand_over=dict.fromkeys(("tokens", "text"), "speculators prepare-data --data {}"),
    ),
    # modelopt/torch/utils/plugins/transformers_dataset.py: the chat template is given the messages as
    # they are; tools it is never given.
    "modelopt": Trainer(
        "ModelOpt",
        TextForm(turns="messages", reasoning=True),
        hand_over={"text": "data.data_path={}"},
    ),
    # nemo_automodel/components/datasets/llm/chat_dataset.py refuses unknown roles, and tool_calls that
    # are null, as a column holds for every turn without.
    "automodel": Trainer(
        "NeMo AutoModel",
        TextForm(turns="messages", reasoning=True, suffix=".parquet"),
        hand_over={"text": "recipe_args.train_data_path: {}"},
    ),
}
