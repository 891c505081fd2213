"""Settings of a run that are not of the experiment: two runs that differ in these alone are runs of one experiment."""

from dataclasses import dataclass, fields

from runtime.flags import check_fields, require, setting

MOST_SECONDS = 86_400


@dataclass(frozen=True)
class RunSettings:
    """Base of a trainer's configuration."""

    seed: int = setting(0, "seed of the first trial's initialization; trial i takes seed + i", at_least=0)
    trials: int = setting(1, "runs in this process, after one compilation", at_least=1)
    data_dir: str = setting("data/fineweb10B", "folder of the *train_*.bin and *val_*.bin shards")
    log_dir: str = setting("logs", "folder of the run logs")
    claim: str = setting("", "claim.json that the runs are to show: source, configuration and seeds must be its own")
    checkpoint_every: str = setting("10m", "steps (500) or minutes (10m) between checkpoints; 0: only when interrupted")
    checkpoint_dir: str = setting("checkpoints", "folder of the checkpoints")
    keep_model: bool = setting(False, "keep the last state of a finished run; off: its checkpoints are removed")
    resume: str = setting("", "auto: go on with the broken-off runs of these settings; or a folder of checkpoints")
    resume_anyway: bool = setting(False, "resume even with another source or configuration")
    capture_nonfinite: str = setting("", "folder for the tokens of steps that are skipped as not finite")
    rank_timeout: float = setting(60.0, "seconds after which a silent rank ends the others", at_least=1)
    dry_run: bool = setting(False, "check everything, estimate memory, time and cost, and stop")
    price: float = setting(3.0, "dollars per GPU-hour, for that estimate", at_least=0)

    def __post_init__(self) -> None:
        check_fields(self)
        Interval.parse(self.checkpoint_every)
        require(self, {"rank_timeout": (self.rank_timeout <= MOST_SECONDS, f"at most {MOST_SECONDS:,}")})


SETTINGS_OF_A_RUN = tuple(field.name for field in fields(RunSettings))


@dataclass(frozen=True)
class Interval:
    """How often a run is saved: every so many steps or minutes; 0 is never."""

    steps: int = 0
    minutes: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """From "500" (steps), "10m" (minutes) or "0". Raises ValueError."""
        number = text.removesuffix("m")
        try:
            interval = cls(minutes=float(number)) if number != text else cls(steps=int(number))
        except ValueError:
            interval = cls(steps=-1)
        if not (interval.steps >= 0 and 0 <= interval.minutes < float("inf")):
            raise ValueError(f"--checkpoint-every {text}: it must be a number of steps such as 500, of minutes such as "
                             f"10m, or 0 for none.")
        return interval
