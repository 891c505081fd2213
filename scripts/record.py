"""Records: a claim before the runs, a page after them, a check that anyone can repeat.

    python scripts/record.py claim CamelName --about "what is new" -- --steps 30
    python scripts/record.py make records/small/<date>_CamelName
    python scripts/record.py verify records/small/<date>_CamelName ... [--rerun]

`claim` fixes source, settings and seeds, commits that, and prints the command of the runs. `make`
collects the runs and writes the record's page and the board. `verify` recomputes everything;
with --rerun it also trains two seeds again: that runs code of others, with your rights.
Exit code: 0 done or verified, 1 the record does not hold or the claim could not be committed, 2 bad
input, or it cannot run here.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # starts from any folder

from scripts.command import ROOT, ask_trainer, command, make_parser, start

from claims import pages
from claims import record as records
from claims.arms import ALPHA
from claims.checks import find_failures, forbidden_settings
from claims.judge import find_judged, fresh_seeds
from claims.rerun import rerun
from claims.stats import power
from runtime.claim import Claim
from runtime.errors import Refused
from runtime.log import config_hash
from runtime.source import digest, read_sources

RECORDS = ROOT / "records"


# ---- claim


def claim(arguments: argparse.Namespace) -> int:
    """Write and commit a claim, and say how to make its runs, whose flags follow --."""
    source, flags = read_sources(ROOT), arguments.flags
    if arguments.from_judgement is not None:
        judged = find_judged(arguments.judgements, arguments.from_judgement, digest(source))
        flags = judged["B"]["flags"] + flags
    require_own_flags(flags)
    seeds = fresh_seeds(arguments.seed, arguments.n, Path("logs"), arguments.judgements, RECORDS)
    config = ask_trainer(ROOT, flags)
    for name in ("recipe", "track"):  # their defaults may change, or depend on the machine
        if f"--{name}" not in [word.partition("=")[0] for word in flags]:
            flags = [f"--{name}", config[name], *flags]
    if reason := records.why_no_claim(config):
        raise Refused(f"{reason}.")
    for found in forbidden_settings(source):
        raise Refused(f"{found}, which no record of {config['track']} may have. Leave it out.")
    track = records.TRACKS[config["track"]]
    ask_trainer(ROOT, [*flags, "--claim=x"])  # its own rules, such as how many layers
    claimed = Claim(
        name=arguments.name, track=config["track"], target=track.target, alpha=ALPHA, n=arguments.n,
        seeds=seeds, looks=[arguments.n], source_sha256=digest(source),
        config_sha256=config_hash(config), config=config, flags=flags, about=arguments.about,
        created=datetime.now(UTC).isoformat(timespec="seconds"))
    folder = records.write_claim(RECORDS, claimed, source)
    failed = commit(folder, claimed.source_sha256, arguments.name)
    proof = "committed with its source. Push it, so that others see it."
    print(f"{os.path.relpath(folder)}: {failed or proof}")
    here = os.path.relpath(folder)
    words = shlex.join(["--claim", f"{here}/claim.json", *flags])
    print(f"Make its runs:\n\n    ./run.sh {words} --seed {seeds[0]} --trials {claimed.n}\n\n"
          f"then: python scripts/record.py make {here}\n")
    small, even, large = (f"{power(claimed.n, 1, sds, ALPHA):.0%}" for sds in (0.5, 1, 1.5))
    print(f"Chance that {claimed.n} runs show a mean below {track.target:g}: {small}, {even} or "
          f"{large}, if the true mean\nis half, one or one and a half standard deviations of a run "
          f"below it.")  # fmt: skip
    if track.baseline:
        print(f"They must also show a loss on new tokens less than {records.MOST_ABOVE:g} above "
              f"that of {track.baseline}.")  # fmt: skip
    return 1 if failed else 0


def require_own_flags(flags: list[str]) -> None:
    """Refused for a flag after -- that belongs before it, or that a claim fixes itself."""
    named = [word.partition("=")[0] for word in flags]
    for name in ("--n", "--about", "--from-judgement", "--judgements"):
        if name in named:
            raise Refused(f"{name} stands after --, where flags of the trainer are. Give it before "
                          "the --.")  # fmt: skip
    for name in ("--seed", "--trials"):
        if name in named:
            raise Refused(f"{name}: a claim chooses its seeds, one for each of --n runs. Omit it, "
                          "or give --seed before the --.")  # fmt: skip


def commit(folder: Path, source_sha256: str, name: str) -> str | None:
    """Commit the claim and its source, and nothing else. None, or what to do if that failed."""
    paths = [str(folder / "claim.json"), str(records.source_path(RECORDS, source_sha256))]
    git = ["git", "-C", str(RECORDS)]
    done = None
    for words in (["add", *paths], ["commit", "-q", "-m", f"Claim {name}", *paths]):
        try:
            done = subprocess.run([*git, *words], capture_output=True, text=True)
        except OSError as error:
            return f"not committed, {error}. Commit it before its runs, as a proof."
        if done.returncode:
            why = " ".join((done.stderr or done.stdout).split())[:200]
            return f"not committed: {why}. Commit it before its runs, as a proof."
    return None


# ---- make


def make(arguments: argparse.Namespace) -> int:
    """Collect the runs of a claim, write its page and the board; without a folder, all pages."""
    if arguments.folder is None:
        for path in RECORDS.glob("*/*/claim.json"):
            evidence = records.read_evidence(path.parent)
            if evidence.runs:
                pages.write_page(evidence)
        return write_board()
    folder = arguments.folder
    logs = arguments.logs or [path for path in [Path("logs")] if records.has_runs(path, folder)]
    records.copy_runs(folder, logs)
    evidence = records.read_evidence(folder)
    pages.write_page(evidence)
    code = print_verdict(evidence)
    ours = folder.resolve().is_relative_to(RECORDS.resolve())  # no board of a stranger's record
    return code or (write_board() if ours else 0)


def write_board() -> int:
    """Write the page and the pictures of all records, if none of them fails."""
    found = [records.read_evidence(path.parent) for path in sorted(RECORDS.glob("*/*/claim.json"))]
    made = sorted((one for one in found if one.runs), key=lambda one: one.claim.created)
    for one in made:
        if find_failures(one) or list(pages.differences(one)):
            return print_verdict(one)
    for track in {one.claim.track for one in made if one.shown and one.track.ranked}:
        claims = [one for one in made if one.claim.track == track]
        try:
            pages.plot_tokens(pages.best_of_each_recipe(claims), RECORDS / track / "tokens.svg")
        except Refused as error:
            print(f"{track}/tokens.svg stays as it is: {error}")
    (RECORDS / "README.md").write_text(pages.leaderboard(made))
    print(f"{RECORDS / 'README.md'}: {len(made)} claims")
    return 0


# ---- verify


def verify(arguments: argparse.Namespace) -> int:
    """Check records against their logs; 1 if one does not hold."""
    if arguments.data_dir and not arguments.rerun:
        raise Refused("--data-dir says where a rerun finds its data. Add --rerun.")
    code = 0
    for folder in arguments.folders:
        evidence = records.read_evidence(folder)
        code |= print_verdict(evidence)
        if arguments.rerun:
            code |= run_again(evidence, arguments.data_dir)
    return code


def print_verdict(evidence: records.Evidence) -> int:
    """Print why a record fails and what it shows; 0 when its evidence holds."""
    failures = [*find_failures(evidence), *pages.differences(evidence)]
    for failure in failures:
        print(f"{evidence.folder}: {failure.what}\n    in {failure.where}\n    fix: {failure.fix}")
    verdict = "verified" if evidence.shown else "verified, and NOT shown"
    if failures:
        verdict = f"NOT VERIFIED, {len(failures)} failure{'s' if len(failures) > 1 else ''}"
    print(f"{evidence.folder}: {verdict}")
    for condition, shown in pages.conditions(evidence):
        print(f"    {'shown' if shown else 'NOT shown'}: {condition}")
    if evidence.new_tokens and evidence.new_tokens.measure != pages.NEW[0]:
        print(f"    {' '.join(pages.MARKED.split())}")
    if evidence.narrow:
        print(f"    {evidence.narrow}")
    if evidence.committed is None:
        print("    not checked: whether its claim was first; there is no git history here")
    return 1 if failures else 0


def run_again(evidence: records.Evidence, data_dir: Path | None) -> int:
    """Run the record's source and print what differs; 0 if nothing does beyond its bound."""
    data, failed = (data_dir or ROOT / evidence.claim.config["data_dir"]).resolve(), 0
    with tempfile.TemporaryDirectory(prefix="rerun_") as folder:
        for each in rerun(evidence, data, Path(folder)):
            numbers = f"{each.found:<9.6g} at most {each.allowed:<9.6g}"
            verdict = "" if each.holds else "DIFFERS"
            print(f"    {each.what:<60} {numbers} {each.where:<16} {verdict}".rstrip())
            failed += not each.holds
    print(f"{evidence.folder}: {f'NOT REPEATED, {failed} differ' if failed else 'repeated'}")
    return 1 if failed else 0


@command
def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)  # flags of the trainer follow
    parser, _ = make_parser(__doc__)
    commands = parser.add_subparsers(required=True)

    def add_command(run: Callable[[argparse.Namespace], int]) -> Callable[..., object]:
        sub = commands.add_parser(run.__name__, help=run.__doc__, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub.add_argument

    add = add_command(claim)
    add("name", help="CamelName of the record")
    add("--about", required=True, help="what is changed and why it should help")
    add("--n", type=int, default=10, help="runs, at least 4 (%(default)s)")
    add("--seed", type=int, help="of the first run (the first untried one)")
    add("--from-judgement", type=int, nargs="?", const=0, metavar="N",
        help="claim B of judgement N (the last) with its flags, on fresh seeds")
    add("--judgements", type=Path, default=Path("logs/judge"), help="their folder (%(default)s)")
    add = add_command(make)
    add("folder", type=Path, nargs="?", help="folder of claim.json; none: all pages again")
    add("logs", type=Path, nargs="*", help="log folders of its runs (logs)")
    add = add_command(verify)
    add("folders", type=Path, nargs="+", metavar="folder")
    add("--rerun", action="store_true", help="train two seeds again with the record's source")
    add("--data-dir", type=Path, help="with --rerun: folder of the shards (the run's)")
    arguments = parser.parse_args(argv[:cut], argparse.Namespace(flags=argv[cut + 1 :]))
    return arguments.run(arguments)


if __name__ == "__main__":
    start(main)
