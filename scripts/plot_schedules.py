"""Draw the schedules of a configuration: learning rate, momentum and windows by step.

    python scripts/plot_schedules.py                                  tiny, to schedules.svg
    python scripts/plot_schedules.py --out short.png -- --track short --cooldown 0.6

Needs matplotlib (requirements-dev.txt). Exit code: 0 done, 2 bad input.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

import train_gpt
from runtime.flags import parse


def curves(config: train_gpt.Config) -> dict[str, list[float]]:
    """The value of each schedule at every step."""
    steps = range(config.steps)
    drawn: dict[str, list[float]] = {
        "learning rate, share of its peak": [train_gpt.learning_rate(config, step) for step in steps],
        "momentum of hidden matrices": [train_gpt.momentum(config, step) for step in steps],
    }
    if config.window_block:
        drawn["long window, tokens"] = [train_gpt.window(config, step) * config.window_block for step in steps]
    return drawn


def draw(config: train_gpt.Config, path: Path) -> None:
    """One panel a schedule, the extension shaded."""
    from matplotlib.figure import Figure

    panels = curves(config)
    figure = Figure(figsize=(8, 2.2 * len(panels)), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(len(panels), sharex=True), panels.items(), strict=True):
        axes.step(range(config.steps), values, where="post")
        axes.axvspan(config.steps - config.extension, config.steps, alpha=0.15)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
    axes.set_xlabel(f"step of track {config.track}, recipe {config.recipe}; shaded: the extension")
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("schedules.svg"), help="picture to write: .svg, .png or .pdf")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --: flags of train_gpt.py")
    arguments = parser.parse_args(argv)
    try:
        draw(parse(train_gpt.Config, arguments.flags, train_gpt.preset, ""), arguments.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
