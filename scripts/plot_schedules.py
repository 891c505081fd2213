"""Draw what recipes do at each step: learning rate, windows, batch, momentum, weights of losses.

    python scripts/plot_schedules.py mine.svg "--track tiny" "--track short --recipe modern"

Each text after the picture's name holds flags of train_gpt.py and becomes a column of the picture.
Exit code: 0 done, 2 bad input.
"""

import math
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it starts from any folder

import train_gpt
from claims.plots import Schedule, plot_schedules
from runtime.settings import parse
from scripts.command import command, make_parser, start, svg
from train_gpt import Config


def schedule_of(config: Config) -> Schedule:
    """The schedule of a run with this configuration."""
    steps = range(config.steps)
    windows = [train_gpt.windows_at(config, step) for step in steps]
    quantities: dict[str, dict[str, list[float]]] = {
        "learning rate, factor": {"all": [train_gpt.learning_rate(config, step) for step in steps]},
        "window, tokens": {kind: [window[kind] for window in windows] for kind in windows[0]},
        "batch, 1000 tokens": {"all": [train_gpt.batch_at(config, step) / 1000 for step in steps]},
        "momentum": {"matrices": [momentum_at(config, step) for step in steps]},
        "weight in the loss": weights_of(config),
    }
    return Schedule([span.first for span in train_gpt.spans(config)], quantities)


def momentum_at(config: Config, step: int) -> float:
    """Momentum of the hidden matrices; with Adam its beta1, which is constant."""
    if config.optimizer in ("adam", "torch_adamw"):
        return config.momentum[1]
    return train_gpt.momentum(config, step)


def weights_of(config: Config) -> dict[str, list[float]]:
    """Weights of each predicted token at each step, nan where a stage does not predict it."""
    lines: dict[str, list[float]] = {}
    for step in range(config.steps):
        weights = train_gpt.loss_weights(config, step)
        ahead = len(train_gpt.stage_at(config, step).ahead)
        names = [*[f"token +{distance + 1}" for distance in range(ahead + 1)], "prefix"]
        for name, weight in zip(names, weights, strict=False):
            lines.setdefault(name, [math.nan] * config.steps)[step] = weight
    return lines


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("picture", type=svg, help="file to write, NAME.svg")
    parser.add_argument("recipes", nargs="+", metavar="FLAGS", help="of train_gpt.py, in quotes")
    given = parser.parse_args(argv)
    schedules = {}
    for words in given.recipes:
        config = parse(Config, shlex.split(words), train_gpt.preset, "")
        schedules[textwrap.fill(words, 40)] = schedule_of(config)
    plot_schedules(schedules, given.picture)
    return 0


if __name__ == "__main__":
    start(main)
