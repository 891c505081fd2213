"""Two arms compared, in sentences."""

import math

from claims.arms import ArmVerdict, Comparison, compare_new_tokens
from claims.runs import NEW_TOKENS, shared_measure
from claims.stats import Difference, in_words, moments


def in_sentences(a: ArmVerdict, b: ArmVerdict, found: Comparison) -> str:
    """What the page says of two groups, and `significance.py --against` of two arms."""
    lines = []
    for name, arm in (("A", a), ("B", b)):
        loss, seconds = moments(arm.losses)[0], moments(arm.seconds)[0]
        time = f", {seconds:.3f} s" if seconds >= 0 else ""  # NaN: the logs have no times
        lines += [f"{name} = {arm.name}: n {len(arm.runs)}, loss {loss:.5f}{time}"]
        lines += [f"  {warning}" for warning in arm.warnings]
        lines += [f"  left out: {lost['path']}: {lost['reason']}" for lost in arm.incomplete]
    how = f"on {found.pairs} pairs of one seed" if found.pairs else "of independent runs"
    word = direction(found.loss, "lower", "higher")
    lines.append(f"B - A {how}, with 95 % intervals:")
    lines.append(f"  loss {in_words(found.loss, '+.5f')}, {word}")
    if (new := compare_new_tokens(a, b)) is not None:
        word = direction(new, "lower", "higher")
        old = shared_measure(a.runs + b.runs) != NEW_TOKENS[0]
        how = " as measured before 2026-11-29" if old else ""
        lines.append(f"  loss on new tokens{how} {in_words(new, '+.5f')}, {word}")
    if found.differs:
        lines.append("  times are not compared, as the machines differ:")
        lines += [f"    {what}" for what in found.differs]
    elif not math.isnan(found.seconds.mean):
        word = direction(found.seconds, "faster", "slower")
        lines.append(f"  time {in_words(found.seconds, '+.3f')} s, {word}, on this machine")
    if found.equal_loss is not None:
        p = "no test" if math.isnan(found.equal_loss) else f"p = {found.equal_loss:.3g}"
        lines.append(f"  losses differ by less than the margin: {p}")
    return "\n".join(lines)


def direction(found: Difference, below: str, above: str) -> str:
    if found.high < 0:
        return below
    return above if found.low > 0 else f"not shown to be {below} or {above}"
