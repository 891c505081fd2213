"""Add what a stage of gpu_check.sh did to the figures of this machine and day: a JSON file and a page made of it.

    python scripts/gpu_report.py RESULTS DATE STAGE-figures

The last is a folder. Its file `ran` has a line for each command: name, exit code, seconds and words, with tabs between;
NAME.out and NAME.err are what it printed, NAME.json its figures, if they are not NAME.out. Exit code 1 where commands
failed or missed a bound, or the JSON file of before cannot be read: it is kept under another name.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from runtime import environment
from runtime.log import source_hash

ROOT = Path(__file__).resolve().parent.parent
LEAST_GAIN, WITH_BOUND = 1.15, (768, 3072, "triton")  # of symmetric products in orthogonalization over plain ones
LAST_LINES = 60  # of what a command printed


def read_command(folder: Path, name: str, code: int, seconds: int, words: str) -> dict[str, Any]:
    out, err = ((folder / f"{name}.{kind}").read_text(encoding="utf-8", errors="replace") for kind in ("out", "err"))
    written = folder / f"{name}.json"
    raw = written.read_text(encoding="utf-8") if written.exists() else out if out.startswith("{") else "null"
    said = (err if raw == out else out) + (err if code else "")
    figures = json.loads(raw) if code == 0 else None
    return {"command": words, "seconds": seconds, "faults": faults(code, figures), "figures": figures,
            "text": said.rstrip().splitlines()[-LAST_LINES:]}  # fmt: skip


def faults(code: int, figures: Any) -> list[str]:
    """Why a command has not passed."""
    sets = figures.get("sets", {}).values() if isinstance(figures, dict) else ()
    gains = [o["gain"]["median"] for found in sets for o in found["orthogonalization"]
             if (o["n"], o["m"], o["backend"]) == WITH_BOUND]  # fmt: skip
    slow = [f"a gain of {gain:.3f} for {WITH_BOUND}, under {LEAST_GAIN}" for gain in gains if gain < LEAST_GAIN]
    return slow + ([f"exit code {code}"] if code else [])


def earlier(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The stages that a file holds; none, and the fault, of one that is torn, which is moved aside."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["stages"] if path.exists() else {}, []
    except (ValueError, LookupError, TypeError) as error:
        aside = path.rename(f"{path}.torn-{path.stat().st_mtime_ns}")
        return {}, [f"error: {path} holds no stages ({error}); it is kept as {aside}, and a new one begins"]


def as_page(result: dict[str, Any]) -> str:
    lines = [f"# {result['env']['gpu'] or result['env']['cpu']}, {result['date']}", ""]
    lines += [f"- {name}: {value}" for name, value in result["env"].items()]
    for stage, done in result["stages"].items():
        lines += ["", f"## {stage}", "", f"Source: {done['source']}"]
        for name, found in done["commands"].items():
            ended = f"FAILED, {'; '.join(found['faults'])}" if found["faults"] else "passed"
            lines += ["", f"### {stage}, {name}: {ended}, {found['seconds']} s", "", f"`{found['command']}`", ""]
            lines += ["```", *found["text"], "```"]
    return "\n".join([*lines, ""])


def main(results: str, date: str, figures: str) -> int:
    folder, commands = Path(figures), {}
    for line in (folder / "ran").read_text(encoding="utf-8").splitlines():
        name, code, seconds, words = line.split("\t")
        commands[name] = read_command(folder, name, int(code), int(seconds), words)
    env = environment.describe(environment.start(), torch.bfloat16)
    slug = re.sub(r"[^a-z0-9]+", "-", str(env["gpu"] or "cpu").lower()).strip("-")
    path, stage = Path(results, f"{date}_{slug}.json"), folder.name.removesuffix("-figures")
    old, failed = earlier(path)
    result = {"date": date, "env": env, "stages": old | {stage: {"source": source_hash(ROOT), "commands": commands}}}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(as_page(result), encoding="utf-8")
    failed += [f"{stage}, {name}: {fault}" for name, found in commands.items() for fault in found["faults"]]
    print("\n".join([*failed, f"{stage}: figures in {path}"]))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
