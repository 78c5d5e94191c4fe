"""The entry point `vllm.general_plugins` of sfdd: vLLM calls it in every one of its processes.

It costs a few names in a registry: classes are made when an engine asks for one by name, which only
`sfdd score` does.
"""

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

PREFIX = "Sfdd"
SETTINGS = "sfdd"  # key of an engine's `additional_config`
OWNER = "SFDD_ENGINE_OWNER"  # process id of the `sfdd` that starts engines
_MODELS = "sfdd.targets.vllm.models"
_SECONDS_BETWEEN_LOOKS = 1.0


def register() -> None:
    """Add `Sfdd<Architecture>` for every text-generation architecture; may be called again.

    Never raises: vLLM runs for other purposes, too, and must not fail for sfdd's sake. What is missing
    is said when sfdd starts an engine.
    """
    try:
        from vllm import ModelRegistry

        from sfdd.targets.vllm import private

        for architecture in private.text_generation_architectures():
            name = PREFIX + architecture
            if name not in ModelRegistry.get_supported_archs():
                ModelRegistry.register_model(name, f"{_MODELS}:{name}")
            private.share_settings(architecture, name)
    except Exception as error:
        log.debug("sfdd's architectures cannot be registered with this vLLM: %s", error)
    if os.environ.get(OWNER) == str(os.getppid()):
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(owner: int) -> None:
    """End this engine when its owner is gone, killed perhaps: vLLM's would stay, and keep its GPU."""
    while os.getppid() == owner:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGKILL)
