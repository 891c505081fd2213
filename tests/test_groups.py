"""Which optimizer steps a parameter: by a rule, on models made here by hand, or by a table."""

import pytest
import torch
from small_optim import bits, give_gradients
from torch import nn

from optim import AdamW, NorMuon, Row, build_optimizers, group_table, groups_for

pytestmark = pytest.mark.core


class Conv1D(nn.Module):
    """As in transformers."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


def block(**layers):
    return nn.ModuleDict(layers)


def language_model():
    """A head tied to the embedding, layers as in GPT-2, and one with a mixture of experts.

    The experts are stacks (E, rows, cols) with biases (E, rows). Their gate has one row, and a
    Linear that is no head is named "output".
    """
    gpt2 = [
        block(
            ln_1=nn.LayerNorm(8),
            attn=block(c_attn=Conv1D(24, 8), c_proj=Conv1D(8, 8)),
            mlp=block(c_fc=Conv1D(32, 8), c_proj=Conv1D(8, 32)),
        )
        for _ in range(2)
    ]
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
    experts.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 12))
    experts.down_proj = nn.Parameter(torch.randn(4, 8, 6))
    gate, output = nn.Linear(8, 1, bias=False), nn.Linear(6, 8, bias=False)
    mixture = block(router=nn.Linear(8, 4), experts=experts, gate=gate, output=output)
    layers = nn.ModuleList([*gpt2, mixture])
    trunk = block(wte=nn.Embedding(50, 8), wpe=nn.Embedding(16, 8), h=layers)
    model = block(transformer=trunk, lm_head=nn.Linear(8, 50, bias=False), score=nn.Linear(8, 2))
    model["lm_head"].weight = trunk["wte"].weight
    return model


def vit():
    """A patch convolution, and embeddings that are plain parameters."""
    layers = nn.ModuleList([block(attn=nn.MultiheadAttention(8, 2), norm=nn.LayerNorm(8))])
    patches = block(proj=nn.Conv2d(3, 8, 4, stride=4))
    model = block(patch_embed=patches, blocks=layers, fc=nn.Linear(8, 10))
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
    model.pos_embed = nn.Parameter(torch.zeros(1, 17, 8))
    model.pos_emb = nn.Parameter(torch.zeros(1, 16, 8))  # minGPT's name
    return model


def packed():
    """Q, K and V of unequal heights in one matrix."""
    return nn.ModuleList([block(qkv=nn.Linear(768, 1024, bias=False), proj=nn.Linear(768, 768))])


TABLES = {
    language_model: """
adamw embedding, tied to lm_head.weight     1 x (50, 8) transformer.wte.weight
adamw embedding                             1 x (16, 8) transformer.wpe.weight
adamw norm, bias or vector                  2 x (8,) transformer.h.*.ln_1.weight
adamw head, by its name                     1 x (2, 8) score.weight
adamw norm, bias or vector                  1 x (2,) score.bias
muon  hidden matrix                         2 x (8, 24) transformer.h.*.attn.c_attn.weight, \
packs Q, K and V: split=3
muon  hidden matrix                         1 x (4, 8) transformer.h.*.router.weight
muon  stack of hidden matrices              1 x (4, 12, 8) transformer.h.*.experts.gate_up_proj, \
packs gate and up: split=2
adamw norm, bias or vector                  1 x (4, 12) transformer.h.*.experts.gate_up_proj_bias
adamw norm, bias or vector                  1 x (1, 8) transformer.h.*.gate.weight
muon  hidden matrix                         1 x (8, 6) transformer.h.*.output.weight
""",
    vit: """
adamw embedding                             1 x (1, 1, 8) cls_token
adamw embedding                             1 x (1, 17, 8) pos_embed
adamw embedding                             1 x (1, 16, 8) pos_emb
adamw convolution                           1 x (8, 3, 4, 4) patch_embed.proj.weight
muon  hidden matrix                         1 x (24, 8) blocks.*.attn.in_proj_weight, \
packs Q, K and V: split=3
muon  hidden matrix                         1 x (8, 8) blocks.*.attn.out_proj.weight
adamw head, the last Linear                 1 x (10, 8) fc.weight
""",
}


@pytest.mark.parametrize("build", TABLES)
def test_the_rule_sends_every_part_once_where_the_table_says_and_both_optimizers_take_it(build):
    model = build()
    groups = groups_for(model)
    table = group_table(groups).splitlines()
    for line in TABLES[build].strip().splitlines():
        assert line in table
    found = []
    for group in [*groups["muon"], *groups["adamw"]]:
        decays = group["name"] != "norm, bias or vector"
        assert group.get("wd_mul", 1.0) == decays
        found += [param for _, param in group["params"]]
    assert sorted(map(id, found)) == sorted(map(id, model.parameters()))
    give_gradients(found, 0)
    before = [bits(param) for param in found]
    for kind, optimizer in (("muon", NorMuon), ("adamw", AdamW)):
        optimizer = optimizer(groups[kind], 0.1)
        optimizer.step()
        saved = optimizer.state_dict()["param_groups"]  # a key that means nothing to it stays
        assert [group["name"] for group in saved] == [group["name"] for group in groups[kind]]
    assert not any(bits(param) == old for param, old in zip(found, before, strict=True))


@pytest.mark.parametrize(("name", "shape", "split"), [
    ("h.0.attn.c_attn.weight", (768, 2304), "Q, K and V: split=3"),
    ("0.qkv.weight", (1024, 768), "Q, K and V: split=their rows"),
    ("experts.gate_up_proj", (4, 28672, 4096), "gate and up: split=2"),
    ("experts.gate_up_proj", (4, 2880, 5760), "gate and up: split=2"),  # (E, inputs, outputs)
    ("experts.gate_up_proj", (4, 4096, 7168), "gate and up: split=(2048, 2048)"),
    ("0.mlp.up.weight", (3072, 768), None),
])  # fmt: skip
def test_the_table_gives_the_split_of_parameters_that_pack_matrices_by_their_names(
    name, shape, split
):
    named = [(name, torch.empty(shape, device="meta"))]
    line = group_table({"muon": [{"name": "hidden matrix", "params": named}]})
    assert line.partition(", packs ")[2] == (split or "")
    given = [{"name": "hidden matrix", "params": named, "split": 2}]
    assert "packs" not in group_table({"muon": given})


def body():
    return nn.ModuleList([block(up=nn.Linear(8, 16), down=nn.Linear(16, 8)) for _ in range(2)])


@pytest.mark.parametrize(("layers", "heads"), [
    (lambda: {"embed": nn.Embedding(40, 8), "up": nn.Linear(8, 40), "top": nn.Linear(8, 40)}, 1),
    (lambda: {"embed": nn.Embedding(40, 8), "up": nn.Linear(8, 40), "top": nn.Linear(8, 8)}, 0),
    (lambda: {"layers": body(), "top": nn.Linear(8, 8)}, 1),
    (lambda: {"layers": body()}, 0),
], ids=["the vocabulary", "no vocabulary", "above a body", "the last of a body"])  # fmt: skip
def test_the_last_linear_is_a_head_if_it_puts_out_the_vocabulary_or_has_no_like(layers, heads):
    assert group_table(groups_for(block(**layers()))).count("head, the last Linear") == heads


def test_rows_override_the_rule_by_any_name():
    rows = [
        Row("*.qkv.weight", "muon", {"split": (768, 128, 128)}),
        Row("*.proj.*", "adamw", {"lr": 0.5}),
    ]
    groups = groups_for(packed(), rows)
    (split,), (other,) = groups["muon"], groups["adamw"]
    assert split["split"] == (768, 128, 128)
    assert [name for name, _ in other["params"]] == ["0.proj.weight", "0.proj.bias"]
    assert split.get("wd_mul") is other.get("wd_mul") is None
    tied = groups_for(language_model(), [Row("lm_head.weight", "muon")])["muon"]
    assert tied[0]["params"][0][0] == "transformer.wte.weight"


# ---- a table that names every parameter


def by_table(model, rows, factories=()):
    return build_optimizers(model.named_parameters(), rows, dict(factories))


def test_a_table_sends_each_parameter_to_its_optimizer_with_its_options():
    model = block(embed=nn.Embedding(9, 4), mlp=nn.Linear(4, 8))
    rows = [
        Row("embed.*", "adam", {"lr_mul": 75.0}),
        Row("*.bias", "torch", {"lr_mul": 4.0, "wd_mul": 2.0}),
        Row("mlp.weight", "muon", {"split": 2}),
    ]
    factories = {
        "adam": lambda groups: AdamW(groups, 0.008),
        "muon": lambda groups: NorMuon(groups, 0.03),
        "torch": lambda groups: torch.optim.AdamW(groups, 0.1, weight_decay=0.5),
    }
    built = by_table(model, rows, factories)
    (adam,), (muon,), (torchs,) = (built[name].param_groups for name in ("adam", "muon", "torch"))
    names = [group["param_names"] for group in (adam, muon, torchs)]
    assert names == [["embed.weight"], ["mlp.weight"], ["mlp.bias"]]
    assert (adam["lr_mul"], muon["lr_mul"], muon["split"]) == (75.0, 1.0, 2)
    assert (adam["initial_lr"], muon["initial_lr"]) == (0.008, 0.03)
    # torch's own know no multipliers: they are folded into lr and weight_decay.
    assert (torchs["initial_lr"], torchs["lr"], torchs["weight_decay"]) == (0.4, 0.4, 0.25)
    assert not {"lr_mul", "wd_mul"} & torchs.keys()
    (kept,) = by_table(model, [Row("*", "torch")], factories)["torch"].param_groups
    assert (kept["lr"], kept["weight_decay"]) == (0.1, 0.5)


def test_a_row_for_an_optimizer_without_a_factory_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"row '\*' has the optimizer 'muno'; use .* adam, muon"):
        by_table(packed(), [Row("*", "muno")], {"adam": AdamW, "muon": NorMuon})


@pytest.mark.parametrize(("build", "patterns", "message"), [
    (groups_for, ["h.*.qvk.*"], r"no parameter has a name that matches \['h.\*.qvk.\*'\]"),
    (groups_for, ["*.qkv.*", "0.*"], r"0.qkv.weight matches several rows: .*'0"),
    (by_table, ["*.proj.*"], r"parameter 0.qkv.weight matches 0 rows: none"),
    (by_table, ["*.proj.*", "0.qvk.*"], r"matches 0 rows: none.* match no parameter: '0.qvk.\*'"),
    (by_table, ["*", "*.qkv.*"], r"parameter 0.qkv.weight matches 2 rows: '\*', '\*.qkv.\*'"),
])  # fmt: skip
def test_rows_that_match_nothing_and_parameters_of_no_row_or_several_are_refused(
    build, patterns, message
):
    with pytest.raises(ValueError, match=message):
        build(packed(), [Row(pattern, "muon") for pattern in patterns])
