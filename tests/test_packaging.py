import subprocess
import sys
import zipfile
from pathlib import Path

import sfdd

ROOT = Path(__file__).parent.parent


def test_the_wheel_installs_and_runs(tmp_path: Path) -> None:
    """Installed and run elsewhere, nothing of the checkout is needed."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sfdd").rglob("*.py")}
    commands = {f"sfdd_cli/{path.name}" for path in (ROOT / "cli").glob("*.py")}
    assert packaged == sources | commands

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    run = "import sys; sys.path.insert(0, sys.argv.pop(1)); from sfdd_cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", run, str(site), "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"sfdd {sfdd.__version__}\n"
