"""Real runs whose longest document changes between two stages."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from small_run import STEPS, run, write_data
from stub_trainer import logs_of, losses_of

import train_gpt
from runtime.run import Run

STAGE = train_gpt.Stage(0.5, short=1, long=2)
CHANGED = {"stages": "constant", "max_document": 48, "checkpoint_every": 0}


def set_stages(monkeypatch, document):
    stages = [replace(STAGE, document=document), STAGE]
    monkeypatch.setitem(train_gpt.STAGES, "constant", stages)


@pytest.fixture
def data(tmp_path, monkeypatch):
    set_stages(monkeypatch, document=16)
    return write_data(tmp_path / "data")


@pytest.mark.usefixtures("two_layers")
def test_attention_is_told_the_longest_document_of_each_step(data, tmp_path, monkeypatch):
    batch_loss, seen = train_gpt.Trainer.batch_loss, []

    def noting(self, batch, longest, weights=None):
        if torch.is_grad_enabled():
            seen.append((int(batch.cu_seqlens.diff().max()), longest))
        return batch_loss(self, batch, longest, weights)

    monkeypatch.setattr(train_gpt.Trainer, "batch_loss", noting)
    assert run(data, tmp_path, **CHANGED).code == 0
    half = STEPS // 2
    assert seen[-STEPS:] == [(16, 16)] * half + [(48, 48)] * half
    assert seen[0] == (48, 48), "warm-up first tries what needs most memory"
    assert all(found == bound for found, bound in seen)


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize("moment", [4, 6, 8])
def test_a_run_resumes_bit_for_bit_around_the_change(moment, data, tmp_path, monkeypatch):
    assert run(data, tmp_path / "whole", **CHANGED).code == 0
    stepped = Run.stepped

    def acting(self, *arguments, **named):
        stepped(self, *arguments, **named)
        if self.steps_done == moment:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)  # until it is heard

    with monkeypatch.context() as patch:
        patch.setattr(Run, "stepped", acting)
        assert run(data, tmp_path / "broken", **CHANGED).code == 143
    assert run(data, tmp_path / "broken", resume="auto", **CHANGED).code == 0
    assert losses_of(*logs_of(tmp_path / "broken")) == losses_of(*logs_of(tmp_path / "whole"))
