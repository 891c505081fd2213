"""Bad input is refused before the first step, in one sentence: the value, the rule and the fix."""

import os
import re
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from small_model import configure
from small_run import BOS, arguments, documents, run, run_words, write_data

import train_gpt
from data.shards import write_shard
from runtime.errors import Refused
from runtime.machine import Machine
from runtime.settings import parse

pytestmark = pytest.mark.core


@pytest.fixture
def copy(data, tmp_path):
    """A copy of the data to spoil."""
    return shutil.copytree(data, tmp_path / "data")


def assert_refused(outcome, *parts):
    """Exit code 2 and one sentence on stderr that has the parts; no run has begun."""
    assert outcome.code == 2, outcome.err
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1, "one line"
    assert [part for part in parts if part not in outcome.err] == [], outcome.err
    assert outcome.logs == []


@pytest.mark.parametrize(("flag", "value", "parts"), [
    ("track", "longest", ["--track longest", "one of", "tiny", "short"]),
    ("recipe", "sgd", ["--recipe sgd", "one of record89, muon, adamw"]),
    ("steps", 0, ["--steps 0", "at least 1"]),
    ("momentum", "0.5,1.5", ["--momentum 0.5,1.5", "below 1"]),
    ("batch_tokens", 0, ["--batch-tokens 0", "a multiple of --seq-len 128"]),
    ("checkpoint_dir", __file__, [f"--checkpoint-dir {__file__}", "cannot be written"]),
    ("val_tokens", 1000, ["--val-tokens 1000", "a multiple of --val-seq-len 256"]),
    ("dim", 40, ["--dim 40", "a multiple of --head-dim 16"]),
    ("ortho_method", "svd", ["--ortho-method", "'svd'", "polar_express"]),
    ("attention", "varlen", ["--attention varlen", "CUDA", "--attention portable"]),
    ("val_tokens", 2**20, ["1,048,577", "Score fewer tokens, or add shards"]),
    ("steps", 1000, ["after 46 steps", "at most 46"]),
])  # fmt: skip
def test_a_bad_value_is_refused_with_its_rule(flag, value, parts, data, tmp_path):
    assert_refused(run(data, tmp_path, **{flag: value}), *parts)


def test_help_lists_the_recipes_that_each_track_accepts():
    (setting,) = (each for each in fields(train_gpt.Config) if each.name == "recipe")
    shown = {}
    for part in setting.metadata["about"].split("; "):
        tracks, recipes = part.split(": ")
        shown |= dict.fromkeys(tracks.split(" and "), re.split(", | or ", recipes))
    assert shown == {track: [*recipes] for track, recipes in train_gpt.RECIPES.items()}


@pytest.mark.parametrize("words", ["--minutes 5", "--gates=adam"])
def test_a_removed_flag_is_refused_with_what_replaces_it(words, data, tmp_path):
    wanted = [*arguments(data, tmp_path / "logs"), *words.split()]
    name = re.split("[ =]", words)[0]
    assert_refused(run_words(wanted, tmp_path / "logs"), name, "GROUPS in train_gpt.py", "759f432")


@pytest.mark.parametrize(("optimizer", "flag"), [
    ("adamw", "--momentum 0.9,0.9"), ("torch_adamw", "--matrix-beta2 0.9"),
    ("muon", "--matrix-beta2 0.9"), ("torch_muon", "--ortho-method newton_schulz"),
])  # fmt: skip
def test_a_flag_that_cannot_act_under_the_optimizer_is_refused(optimizer, flag):
    words = ["--track", "tiny", "--recipe", "adamw", "--optimizer", optimizer, *flag.split()]
    with pytest.raises(Refused, match=f"{flag.split()[0]} does nothing under .*{optimizer}"):
        parse(train_gpt.Config, words, train_gpt.preset, "")


@pytest.mark.parametrize(("track", "device", "most", "parts"), [
    ("tiny", "cpu", 8, ["9 does not divide [8]", "[1, 2, 4, 8] ranks", "no GPU", "--track tiny"]),
    ("small", "cpu", 4, ["9 does not divide [4, 8, 12]", "[1, 2, 4] ranks"]),
    ("short", "cuda", 8, ["9 does not divide [8, 16, 24]", "[1, 2, 4, 8] ranks"]),
])  # fmt: skip
def test_ranks_that_cannot_share_every_step_are_refused_with_counts_that_can(
    track, device, most, parts
):
    config, device = configure(track, "record89"), torch.device(device)
    train_gpt.require_ranks(config, Machine(device, 0, most))
    with pytest.raises(Refused) as refused:
        train_gpt.require_ranks(config, Machine(device, 0, 9))
    assert [part for part in parts if part not in str(refused.value)] == [], refused.value
    assert ("no GPU" in str(refused.value)) == (track == "tiny")


def test_a_text_that_is_missing_is_built_and_one_that_cannot_be_is_refused(tmp_path, monkeypatch):
    def cannot(folder):
        raise OSError("the disk is full")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.prose.ensure", cannot)
    wanted = run("data/prose", tmp_path / "logs")
    assert_refused(wanted, "data/prose cannot be built", "the disk is full")
    monkeypatch.setattr("data.prose.ensure", write_data)
    assert run("data/prose", tmp_path / "logs", steps=2).code == 0


def cut(folder):
    shard = folder / "s_train_1.bin"
    os.truncate(shard, shard.stat().st_size - 20)


def put_a_strange_token(folder):
    tokens = documents(4, 300)
    tokens[777] = 64
    write_shard(folder / "s_train_0.bin", tokens)


def remove_documents(folder):
    for shard in folder.glob("s_train*"):
        write_shard(shard, np.full(10_000, 5))


@pytest.mark.parametrize(("spoil", "parts"), [
    (cut, ["s_train_1.bin"]),
    (put_a_strange_token, ["s_train_0.bin", "token 777 is 64", "has 64 tokens"]),
    (remove_documents, ["after 0 steps", str(BOS)]),
])  # fmt: skip
def test_bad_data_are_refused(spoil, parts, copy, tmp_path):
    spoil(copy)
    assert_refused(run(copy, tmp_path / "logs"), *parts)


def test_missing_data_are_refused_with_what_builds_them_and_make_no_folder(tmp_path):
    wanted = arguments(tmp_path / "none", tmp_path / "logs", track="short")
    fixes = "./run.sh --track", "python -m data.prose"
    assert_refused(run_words(wanted, tmp_path), "none has no *train_*.bin", *fixes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [(40, 40), (14, 2)])  # for a few steps, and for one
def test_a_run_of_as_many_steps_as_a_refusal_allows_is_possible(count, copy, tmp_path):
    """It is shorter than its warm-up, which takes steps of every stage."""
    for index in range(2):
        write_shard(copy / f"s_train_{index}.bin", documents(index + 1, count[index]))
    refused = run(copy, tmp_path / "logs", steps=100)
    most = int(refused.err.split("at most ")[1].split(",")[0])
    assert most < 9
    outcome = run(copy, tmp_path / "logs", steps=most)
    assert outcome.code == 0, outcome.err
