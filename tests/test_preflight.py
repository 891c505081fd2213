"""--dry-run says what a run takes, and leaves nothing behind."""

import re

from small_run import STEPS, arguments, run_words


def test_a_dry_run_says_what_a_run_takes_and_leaves_nothing_behind(data, tmp_path):
    outcome = run_words([*arguments(data, tmp_path), "--dry-run"], tmp_path)
    assert outcome.code == 0, outcome.err
    steps = re.findall(r"^ +\d+:\d\d:\d\d .*: (\d+) steps of [\d.,]+ ms$", outcome.out, re.M)
    assert sum(map(int, steps)) == STEPS
    assert re.search(r"^ +0:00:\d\d 4 validations of [\d.,]+ ms$", outcome.out, re.M)
    assert re.search(r"^peak memory of rank 0, measured: [\d,]+ MiB$", outcome.out, re.M)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
