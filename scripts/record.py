"""Records: a claim before the runs, a folder after them, a check of it, the leaderboards.

    python scripts/record.py claim CamelName --n 10 --seed 1000 --about "what is new" -- --steps 310
    ./run.sh --claim records/tiny/<date>_CamelName/claim.json --seed 1000 --trials 10 --steps 310
    python scripts/record.py make records/tiny/<date>_CamelName logs
    python scripts/record.py verify records/tiny/<date>_CamelName ...
    python scripts/record.py leaderboard                       records/README.md and the pictures beside it
    python scripts/record.py export records/tiny/<date>_CamelName --to FOLDER          as the public contest wants it

Commit the claim before its runs: then the history shows that it was first. Exit code: 0 done or verified, 1 the
record does not hold, 2 bad input.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from runtime.claim import LEAST_RUNS, MOST_RUNS, NAME, Claim, ClaimError, read_claim
from runtime.flags import flag
from runtime.jsonl import plain
from runtime.log import config_hash, source_files, source_hash
from runtime.registry import REGISTRY, RegistryError, read_registry
from runtime.settings import SETTINGS_OF_A_RUN
from scripts.command import numbers, set_up_output
from claims.evidence import ALPHA, TRACKS, Evidence, find_failures, read_evidence
from claims.export import ExportError, export
from claims.pages import derived, differences, history, leaderboard
from claims.pictures import PictureError, loss_curves, timeline
from claims.runlog import LogError

ROOT = Path(__file__).resolve().parent.parent


class RecordError(ValueError):
    """What was asked for cannot be done. The message names the value, the rule and the fix."""


def configuration(flags: list[str]) -> dict[str, Any]:
    """Every setting that the trainer would run with, asked of the trainer itself."""
    command = [sys.executable, str(ROOT / "train_gpt.py"), *flags, "--print-config"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RecordError(f"train_gpt.py does not take these flags: {done.stderr.strip().removeprefix('error: ')}")
    return json.loads(done.stdout)


def make_claim(arguments: argparse.Namespace) -> int:
    """Write claim.json and say how to make its runs."""
    flags = arguments.flags
    if own := sorted({flag(name) for name in SETTINGS_OF_A_RUN} & {word.partition("=")[0] for word in flags}):
        raise RecordError(f"{', '.join(own)}: not part of a claim; see --seed and --n of this command.")
    config, now = configuration(flags), datetime.now(UTC)
    looks = arguments.looks or [arguments.n]
    target = TRACKS[config["track"]].target
    rising = looks == sorted(set(looks)) and looks[0] >= LEAST_RUNS and looks[-1] == arguments.n
    if not LEAST_RUNS <= arguments.n <= MOST_RUNS or not rising:
        raise RecordError(f"--n {arguments.n}, looks {looks}: {LEAST_RUNS} to {MOST_RUNS} runs, the last look at --n.")
    if arguments.seed < 0:
        raise RecordError(f"--seed {arguments.seed}: it must be at least 0.")
    if config["target"] != target:
        raise RecordError(f"--target {config['target']}: that of track {config['track']} is {target}. Leave it out.")
    seeds = list(range(arguments.seed, arguments.seed + arguments.n))
    claim = Claim(
        name=arguments.name, track=config["track"], target=target, alpha=ALPHA, n=arguments.n, seeds=seeds,
        looks=looks, source_sha256=source_hash(ROOT), config_sha256=config_hash(config),
        config=config, flags=flags, about=arguments.about, created=now.isoformat(timespec="seconds"),
    )  # fmt: skip
    folder = arguments.records / claim.track / f"{now:%Y-%m-%d}_{claim.name}"
    if folder.exists():
        raise RecordError(f"{folder} exists: a claim is not written twice. Choose another name.")
    folder.mkdir(parents=True)
    (folder / "claim.json").write_text(json.dumps(plain(claim.__dict__), indent=2) + "\n")
    words = ["--claim", os.path.relpath(folder / "claim.json"), *flags]
    words += ["--seed", str(seeds[0]), "--trials", str(claim.n)]
    print(f"{words[1]}: commit it, then make its runs:\n\n    ./run.sh {shlex.join(words)}\n\n"
          f"then: python scripts/record.py make {os.path.relpath(folder)} logs")
    return 0


# ---- From logs to a record


def make(arguments: argparse.Namespace) -> int:
    """Bring together what belongs to a claim, derive the pages, and say whether it holds."""
    folder = arguments.folder
    require_plain(folder)
    claim = read_claim(folder / "claim.json")
    for logs in arguments.logs:
        if not (logs / REGISTRY).is_file():
            raise RecordError(f"{logs} has no {REGISTRY}: give the --log-dir of the claim's runs.")
        copy_runs(claim, logs, folder)
    evidence = read_evidence(folder)
    for name, content in derived(evidence).items():
        (folder / name).write_bytes(content)
    return judge(evidence)


def require_plain(folder: Path) -> None:
    """RecordError for what a file would be written or read through: links, pipes, devices."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RecordError(f"{path} is a link or no regular file: a record has none. Take it out.")


def copy_runs(claim: Claim, logs: Path, folder: Path) -> None:
    """The logs of all runs that were started under the claim, whatever became of them, their registry and source."""
    registry = read_registry(logs / REGISTRY)
    started = [entry["run_id"] for entry in registry if entry["event"] == "start" and entry.get("claim") == claim.id]
    if not started:
        raise RecordError(f"{logs}: no run was started under the claim of {folder}. Start them with --claim.")
    if strange := [run_id for run_id in started if Path(run_id).name != run_id]:
        raise RecordError(f"{logs / REGISTRY}: run id {strange[0]!r} is no file name; restore it as the runs wrote it.")
    copies = {logs / f"{run_id}.jsonl": folder / "runs" / f"{run_id}.jsonl" for run_id in started}
    copies[logs / REGISTRY] = free_place(folder / "runs", logs / REGISTRY)
    sources = logs / "sources" / claim.source_sha256
    copies |= {path: folder / "source" / path.relative_to(sources) for path in source_files(sources)}
    for original, copy in copies.items():
        if original.is_file():
            if original.resolve() != logs.resolve() / os.path.relpath(original, logs):
                raise RecordError(f"{original} is a link or leads out of {logs}: put the file itself there.")
            place(original, copy)


def free_place(folder: Path, registry: Path) -> Path:
    """registry.jsonl, or registry_2.jsonl and so on for a second log folder; a registry that grew keeps its name."""
    names = chain([REGISTRY], (f"registry_{number}.jsonl" for number in count(2)))
    return next(path for name in names if not (path := folder / name).exists() or begins(registry, path))


def begins(original: Path, copy: Path) -> bool:
    """Whether the original is the copy, or what it has become as lines were added."""
    return original.read_bytes().startswith(copy.read_bytes())


def place(original: Path, copy: Path) -> None:
    if copy.exists() and not begins(original, copy):
        raise RecordError(f"{copy} exists and is not the beginning of {original}: nothing is overwritten. Remove one.")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(original.read_bytes())


def judge(evidence: Evidence) -> int:
    """Print what speaks against a record and what it shows; 0 when it holds."""
    failures = [*find_failures(evidence), *differences(evidence)]
    for failure in failures:
        print(f"{evidence.folder}: {failure.what}\n    in {failure.where}\n    mend: {failure.mend}")
    result, claim = evidence.result, evidence.claim
    says = f"mean loss {result.mean:.6f} of {result.n} runs, p = {result.p:.3g}, level {evidence.level:.3g}"
    if failures:
        print(f"{evidence.folder}: NOT VERIFIED, {len(failures)} failures ({says})")
    else:
        verdict = "shown" if evidence.shown else "NOT shown"
        print(f"{evidence.folder}: verified; below {claim.target:g} is {verdict} ({says})")
    return 1 if failures or not evidence.shown else 0


def verify(arguments: argparse.Namespace) -> int:
    return max(judge(read_evidence(folder)) for folder in arguments.folders)


def make_leaderboard(arguments: argparse.Namespace) -> int:
    """Write the page and the pictures of all records; a record that cannot be verified stops it."""
    evidences = [read_evidence(path.parent) for path in sorted(arguments.records.glob("*/*/claim.json"))]
    evidences = sorted((evidence for evidence in evidences if evidence.runs), key=lambda found: found.claim.created)
    refused = [evidence for evidence in evidences if any(find_failures(evidence)) or any(differences(evidence))]
    if refused:
        return max(map(judge, refused))
    for track in dict.fromkeys(evidence.claim.track for evidence in evidences):
        claims = [evidence for evidence in evidences if evidence.claim.track == track]
        timeline(history(claims), arguments.records / track / "timeline")
        curves = {evidence.claim.name: evidence.complete for evidence in claims}
        loss_curves(curves, TRACKS[track].target, arguments.records / track / "losses")
    (arguments.records / "README.md").write_text(leaderboard(arguments.records, evidences))
    print(f"{arguments.records / 'README.md'}: {len(evidences)} claims")
    return 0


def make_export(arguments: argparse.Namespace) -> int:
    for path in export(read_evidence(arguments.folder), arguments.to, arguments.baseline):
        print(path)
    return 0


# ---- Command line


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; what stands behind -- for the trainer are the `flags`."""
    words = sys.argv[1:] if argv is None else list(argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        sub.set_defaults(run=run)
        sub.add_argument("--records", type=Path, default=ROOT / "records", help="folder of the records (%(default)s)")
        return sub

    claim = command("claim", make_claim, "write a claim; the flags of its runs follow after --")
    claim.add_argument("name", type=camel_name, help="CamelName of the record")
    claim.add_argument("--about", required=True, type=one_line, help="what is changed and why it should help")
    claim.add_argument("--n", type=int, default=10, help="runs that will be made, at least 4 (%(default)s)")
    claim.add_argument("--seed", type=int, default=1000, help="seed of the first run (%(default)s)")
    claim.add_argument("--looks", type=numbers(int, 2, 10**6), help="numbers of runs to test after, such as 5,10 (--n)")

    making = command("make", make, "make the record of a claim from the log folders of its runs")
    making.add_argument("folder", type=Path, help="folder of claim.json")
    making.add_argument("logs", type=Path, nargs="*", help="log folders; none: derive the pages again")
    checking = command("verify", verify, "check records against their logs")
    checking.add_argument("folders", type=Path, nargs="+", metavar="folder")
    command("leaderboard", make_leaderboard, "write the page of all records and its pictures")
    exporting = command("export", make_export, "write a record in the form of the public contest")
    exporting.add_argument("folder", type=Path)
    exporting.add_argument("--to", type=Path, required=True, help="folder to write, empty or not there")
    exporting.add_argument("--baseline", type=Path, help="logs of the record before, timed on the same machine")
    return parser.parse_args(words[:cut], argparse.Namespace(flags=words[cut + 1 :]))


def one_line(text: str) -> str:
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r}: write one line of text")
    return text


def camel_name(text: str) -> str:
    if not re.fullmatch(NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no CamelName: letters and digits, the first a capital")
    return text


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        return arguments.run(arguments)
    except (RecordError, ClaimError, RegistryError, ExportError, PictureError, LogError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    set_up_output()
    sys.exit(main())
