"""List runs with the disk space they take, or delete what they keep.

    python scripts/runs.py                     runs whose logs are in logs/
    python scripts/runs.py --remove RUN...     delete checkpoints and models of these runs

No log is deleted: the registry counts every run that was started, and one without its log looks
hidden to a judge. Exit codes: 0 done, 2 bad input.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

from scripts.command import command, make_parser, start

from claims.logs import read_all
from claims.runs import Run

ROW = "{:<44} {:<12} {:>8} {:>8} {:>9} {:>12}"


def size(path: Path) -> float:
    """MB of a file or a folder; 0 if there is none."""
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()) / 1e6


def lines(runs: Sequence[Run], kept: Path) -> Iterator[str]:
    """A table of the runs, and what all of them take."""
    yield ROW.format("run", "status", "steps", "loss", "log MB", "kept MB")
    total = 0.0
    for run in runs:
        logged, saved = sum(size(each.path) for each in run.segments), size(kept / run.run_id)
        total += logged + saved
        loss = "" if run.final_loss is None else f"{run.final_loss:.4f}"
        steps = run.steps[-1].step if run.steps else 0
        status = run.status or "no end"  # it is running, or was killed
        yield ROW.format(run.run_id, status, steps, loss, f"{logged:.1f}", f"{saved:.1f}")
    yield f"{len(runs)} runs, {total:,.0f} MB"


def remove(names: Sequence[str], runs: Sequence[Run], kept: Path) -> None:
    """Delete what these runs keep. ValueError, with nothing deleted, if one may still need it."""
    known = {run.run_id: run for run in runs}
    for name in names:
        if name not in known or Path(name).name != name:
            raise ValueError(f"{name} is none of the {len(known)} runs here; a list: runs.py")
        if not known[name].end or known[name].status == "interrupted":
            raise ValueError(f"{name} is not done, and needs its checkpoint to go on. Finish "
                             f"it with --resume auto, or delete {kept / name} yourself.")
    for name in names:
        if (kept / name).exists():
            shutil.rmtree(kept / name)
        print(f"removed what {name} kept; its log stays")


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--logs", type=Path, default=Path("logs"), help="folder of logs (%(default)s)")
    add("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="(%(default)s)")
    add("--remove", nargs="+", metavar="RUN", help="delete what these runs keep, but their logs")
    given = parser.parse_args(argv)
    found, unread = read_all([given.logs])
    runs = [run for run in found if run.segments]
    for error in unread:
        print(f"not read: {error}", file=sys.stderr)
    if given.remove:
        remove(given.remove, runs, given.checkpoint_dir)
    else:
        print("\n".join(lines(runs, given.checkpoint_dir)))
    return 0


if __name__ == "__main__":
    start(main)
