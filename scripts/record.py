"""Records: a claim before the runs, a folder after them, its check, the leaderboards.

    python scripts/record.py claim CamelName --about "what is new" -- --steps 30
    python scripts/record.py make records/small/<date>_CamelName logs
    python scripts/record.py verify records/small/<date>_CamelName ... [--rerun --steps 10]
    python scripts/record.py leaderboard            records/README.md and the pictures beside it

Commit a claim before its runs, as proof. `verify --rerun` runs code of others, with your rights.
Exit code: 0 done or verified, 1 the record does not hold, 2 bad input, or it cannot run here.
"""

import argparse
import os
import shlex
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
from runtime.settings import flag
from runtime.source import digest, read_sources, write_files

RECORDS = ROOT / "records"


def claim(arguments: argparse.Namespace) -> int:
    """Write a claim and say how to make its runs, whose flags follow --."""
    source, flags = read_sources(ROOT), arguments.flags
    sha256 = digest(source)
    if arguments.from_judgement is not None:
        judged = find_judged(arguments.judgements, arguments.from_judgement, sha256)
        flags = judged["B"]["flags"] + flags
    seeds = fresh_seeds(arguments.seed, arguments.n, Path("logs"), arguments.judgements, RECORDS)
    if named := {word.partition("=")[0] for word in flags} & {"--seed", "--trials"}:
        raise Refused(f"{', '.join(sorted(named))}: a claim fixes steps, runs and seeds. Omit it.")
    config = ask_trainer(ROOT, flags)
    for name in ("recipe", "track"):  # their defaults may change, or depend on the machine
        if f"--{name}" not in [word.partition("=")[0] for word in flags]:
            flags = [f"--{name}", config[name], *flags]
    track = records.TRACKS[config["track"]]
    if not track.val_sha256:  # verify would fail after the runs
        raise Refused(f"{config['track']} has no val_sha256: add it in claims/record.py and "
                      f"train_gpt.py first. A run with --val-sha256 0 prints it.")  # fmt: skip
    fixed = {"target": track.target, "val_tokens": track.val_tokens, **track.fixed}
    for name, value in records.departures(config, fixed).items():
        raise Refused(f"{flag(name)} {config[name]}: that of the track is {value}. "
                      f"Leave {flag(name)} out.")
    for found in forbidden_settings(source):
        raise Refused(f"{found}, which no record of {config['track']} may have. Leave it out.")
    ask_trainer(ROOT, [*flags, "--claim=x"])  # its own rules, such as how many layers
    claim = Claim(
        name=arguments.name, track=config["track"], target=track.target, alpha=ALPHA, n=arguments.n,
        seeds=seeds, looks=[arguments.n], source_sha256=sha256,
        config_sha256=config_hash(config), config=config, flags=flags, about=arguments.about,
        created=datetime.now(UTC).isoformat(timespec="seconds"))
    folder = os.path.relpath(records.write_claim(RECORDS, claim, source))
    words = shlex.join(["--claim", f"{folder}/claim.json", *flags])
    print(f"{folder}: commit it with records/sources, then make its runs:\n\n"
          f"    ./run.sh {words} --seed {seeds[0]} --trials {claim.n}\n\n"
          f"then: python scripts/record.py make {folder} logs\n")
    chances = [f"{power(claim.n, 1, sds, ALPHA):.2f} if it is {sds}" for sds in (0.5, 1, 1.5)]
    print(f"{claim.n} runs show a mean below {claim.target:g} with a chance of\n    "
          f"{', '.join(chances)} standard deviations below")
    if track.baseline:
        print(f"They must also show a loss on new tokens less than {records.MOST_ABOVE:g} above "
              f"that of {track.baseline}")  # fmt: skip
    return 0


def make(arguments: argparse.Namespace) -> int:
    """Copy the logs of a claim's runs, write the pages, and say whether the record holds."""
    folder = arguments.folder
    records.copy_runs(folder, arguments.logs)
    evidence = records.read_evidence(folder)
    write_files(pages.derived(evidence), folder)
    return print_verdict(evidence)


def print_verdict(evidence: records.Evidence) -> int:
    """Print why a record fails and what it shows; 0 when its evidence holds."""
    failures = [*find_failures(evidence), *pages.differences(evidence)]
    for failure in failures:
        print(f"{evidence.folder}: {failure.what}\n    in {failure.where}\n    fix: {failure.fix}")
    verdict = "verified" if evidence.shown else "verified, and NOT shown"
    if failures:
        verdict = f"NOT VERIFIED, {len(failures)} failures"
    print(f"{evidence.folder}: {verdict}")
    for condition, shown in pages.conditions(evidence):
        print(f"    {'shown' if shown else 'NOT shown'}: {condition}")
    if evidence.new_tokens and evidence.new_tokens.measure != pages.NEW[0]:
        print(f"    {' '.join(pages.MARKED.split())}")
    if evidence.committed is None:
        print("    not checked: whether its claim was first; there is no git history here")
    return 1 if failures else 0


def verify(arguments: argparse.Namespace) -> int:
    """Check records against their logs; 1 if one does not hold."""
    if "rerun" not in arguments and (arguments.steps is not None or arguments.data_dir):
        raise Refused("--steps and --data-dir say how to repeat a run. Add --rerun.")
    code = 0
    for folder in arguments.folders:
        evidence = records.read_evidence(folder)
        code |= print_verdict(evidence)
        if "rerun" in arguments:  # with a seed, or None for the first run
            code |= run_again(evidence, arguments)
    return code


def run_again(evidence: records.Evidence, arguments: argparse.Namespace) -> int:
    """Run the record's source and print what differs; 0 if nothing does beyond its bound."""
    if arguments.steps is not None and arguments.steps < 1:
        raise Refused(f"--steps {arguments.steps}: it must be at least 1")
    data = (arguments.data_dir or ROOT / evidence.claim.config["data_dir"]).resolve()
    seed, steps, failed = arguments.rerun, arguments.steps, 0
    with tempfile.TemporaryDirectory(prefix="rerun_") as folder:
        for each in rerun(evidence, seed, steps, data, Path(folder)):
            numbers = f"{each.found:<9.6g} at most {each.allowed:<9.6g}"
            verdict = "" if each.holds else "DIFFERS"
            print(f"    {each.what:<60} {numbers} {each.where:<16} {verdict}".rstrip())
            failed += not each.holds
    print(f"{evidence.folder}: {f'NOT REPEATED, {failed} differ' if failed else 'repeated'}")
    return 1 if failed else 0


def leaderboard(arguments: argparse.Namespace) -> int:
    """Write the page and the pictures of all records, if none of them fails."""
    found = [records.read_evidence(path.parent) for path in sorted(RECORDS.glob("*/*/claim.json"))]
    made = sorted((one for one in found if one.runs), key=lambda one: one.claim.created)
    for one in made:
        if find_failures(one) or list(pages.differences(one)):
            return print_verdict(one)
    for track in {one.claim.track for one in made if one.shown and one.track.ranked}:
        claims = [one for one in made if one.claim.track == track]
        pages.plot_tokens(pages.best_of_each_recipe(claims), RECORDS / track / "tokens.svg")
    (RECORDS / "README.md").write_text(pages.leaderboard(made))
    print(f"{RECORDS / 'README.md'}: {len(made)} claims")
    return 0


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
    add("folder", type=Path, help="folder of claim.json")
    add("logs", type=Path, nargs="*", help="log folders; none: write the pages again")
    add = add_command(verify)
    add("folders", type=Path, nargs="+", metavar="folder")
    add("--rerun", nargs="?", type=int, default=argparse.SUPPRESS, metavar="SEED",
        help="run the source again, which others wrote, and compare (first run)")
    add("--steps", type=int, help="with --rerun: stop after N (run to the end)")
    add("--data-dir", type=Path, help="with --rerun: folder of the shards (the run's)")
    add_command(leaderboard)
    arguments = parser.parse_args(argv[:cut], argparse.Namespace(flags=argv[cut + 1 :]))
    return arguments.run(arguments)


if __name__ == "__main__":
    start(main)
