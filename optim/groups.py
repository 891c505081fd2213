"""Sends each parameter to exactly one optimizer: by a table, or by a rule for any model."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch.optim import Optimizer

from .base import ShardedOptimizer


@dataclass(frozen=True)
class Row:
    """Parameters whose names match `pattern` form one group of the named optimizer.

    "*" matches any text, "?" any character. options: keys of the group, such as lr_mul and split.
    """

    pattern: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)


def build_optimizers(
    named_parameters: Iterable[tuple[str, Tensor]],
    rows: Iterable[Row],
    factories: Mapping[str, Callable[[list[dict[str, Any]]], Optimizer]],
) -> dict[str, Optimizer]:
    """Return {name: optimizer} for the names in the table. A factory gets one group for each row.

    Sets group["initial_lr"], which a schedule multiplies. torch's own optimizers do not know lr_mul
    and wd_mul, so these are multiplied into lr and weight_decay.
    A row may match nothing. ValueError if a parameter matches no row or several, or if a row names
    an optimizer without a factory.
    """
    named, table = list(named_parameters), list(rows)
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, _ in named:
        patterns = [repr(row.pattern) for row in table if fnmatchcase(name, row.pattern)]
        if len(patterns) != 1:
            found = f"matches {len(patterns)} rows: {', '.join(patterns) or 'none'}"
            unused = [repr(row.pattern) for row in table if not matches(row, named)]
            hint = f". Rows that match no parameter: {', '.join(unused)}" if unused else ""
            raise ValueError(f"parameter {name} {found}; each needs exactly one row{hint}")
    for row in table:
        if row.optimizer not in factories:
            known = ", ".join(factories)
            raise ValueError(f"row {row.pattern!r} has the optimizer {row.optimizer!r}; use one of "
                             f"{known}, or add it to the factories")  # fmt: skip
        if own := matches(row, named):
            groups.setdefault(row.optimizer, []).append({"params": own, **row.options})
    optimizers = {name: factories[name](own) for name, own in groups.items()}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            if not isinstance(optimizer, ShardedOptimizer):
                _fold(group)
            group["initial_lr"] = group["lr"] * 1.0  # a tensor of its own: schedules fill lr
    return optimizers


def matches(row: Row, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The parameters, with their names, that the row's pattern matches."""
    return [(name, param) for name, param in named if fnmatchcase(name, row.pattern)]


def _fold(group: dict[str, Any]) -> None:
    """Multiply lr_mul and wd_mul into lr and weight_decay, for an optimizer of torch."""
    lr_mul, wd_mul = group.pop("lr_mul", 1.0), group.pop("wd_mul", 1.0)
    group["lr"] = group["lr"] * lr_mul  # in place, groups that share a tensor would all change
    if group.get("weight_decay") and lr_mul:
        # torch decays by lr * weight_decay, and lr now contains lr_mul.
        group["weight_decay"] *= wd_mul / lr_mul


# ---- A rule for any model

# A Linear or a bare parameter of one of these names that is in no numbered layer.
HEAD = (
    r"([a-z_]\w*\.)*(\w+_head|head|output|\w+_outputs|classifier|score|unembed|embed_out|logits|"
    r"policy|actor|critic|vocab_\w+)"
)
# Matrices that are often packed in one parameter: pattern of its name, how many, which.
PACKED = (
    (r"c_attn|\w*qkv\w*|query_key_value|in_proj_weight", 3, "Q, K and V"),
    (r"gate_up(_proj)?|w12", 2, "gate and up"),
)

# Reasons of parameters that do not decay.
UNDECAYED = ("norm, bias or vector", "elementwise")


def groups_for(model: Module, rows: Iterable[Row] = ()) -> dict[str, list[dict[str, Any]]]:
    """Return {"muon": groups, "adamw": groups} for all parameters that require a gradient.

    Hidden matrices and stacks of them (k, rows, cols) go to Muon; embeddings, codebooks, heads,
    norms, biases, vectors and convolutions to AdamW. Norms, biases and vectors do not decay, as in
    nanoGPT. A row overrides the rule for the parameters that it matches, by any of the names of a
    tied one. `group_table` prints the groups; group["name"] is the reason.
    ValueError if a row matches no parameter or names another optimizer, or a parameter two rows.
    """
    places: dict[Tensor, list[tuple[str, Module]]] = {}
    for path, module in model.named_modules():
        # A parametrization, such as torch's weight_norm, belongs to the layer that it changes.
        owner = model.get_submodule(re.sub(r"(^|\.)parametrizations\..*", "", path))
        for leaf, param in module.named_parameters(recurse=False):
            if param.requires_grad:
                places.setdefault(param, []).append((f"{path}.{leaf}".lstrip("."), owner))
    heads, table, used = heads_of(model), list(rows), set()
    together: dict[tuple[str, str], dict[str, Any]] = {}
    for param, found in places.items():
        names, modules = zip(*found, strict=True)
        own = [row for row in table if any(fnmatchcase(name, row.pattern) for name in names)]
        used |= {row.pattern for row in own}
        if len(own) > 1:
            raise ValueError(f"parameter {names[0]} matches several rows: {own}; keep one")
        optimizer, reason = kind_of(names[0], param, modules, heads)
        options: Mapping[str, Any] = {"wd_mul": 0.0} if reason in UNDECAYED else {}
        if own:
            optimizer, reason, options = own[0].optimizer, f"row {own[0].pattern}", own[0].options
        reason = ", tied to ".join([reason, *names[1:]])
        group = {"params": [], "name": reason, **options}
        together.setdefault((optimizer, reason), group)["params"].append((names[0], param))
    unused = [row.pattern for row in table if row.pattern not in used]
    if unused:
        raise ValueError(f"no parameter has a name that matches {unused}; see named_parameters()")
    groups: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
    for (optimizer, reason), group in together.items():
        if optimizer not in groups:
            raise ValueError(f"{reason} sends to {optimizer!r}; groups_for knows muon and adamw")
        groups[optimizer].append(group)
    return groups


def kind_of(
    name: str, param: Tensor, modules: Iterable[Module], heads: Mapping[Module, str]
) -> tuple[str, str]:
    """Optimizer and reason of a parameter, from its name, shape and modules."""
    leaf, types = name.rpartition(".")[2], " ".join(type(module).__name__ for module in modules)
    if "Embed" in types or re.search("(^|_)emb|embed|token|position|wte|wpe", leaf):
        return "adamw", "embedding"
    if re.search("code(book|vector|word)", leaf):
        return "adamw", "codebook"
    if "Conv" in types and param.ndim > 2:
        return "adamw", "convolution"
    if leaf.endswith("_log"):  # Mamba's A_log
        return "adamw", "elementwise"
    matrices = param.ndim in (2, 3) and min(param.shape[-2:]) > 1
    if not matrices or "bias" in leaf or re.search(r"Norm\b", types):  # no LayerNormLinear
        return "adamw", "norm, bias or vector"
    for module in heads.keys() & modules:
        return "adamw", heads[module]
    if re.fullmatch(HEAD, name):  # a bare parameter
        return "adamw", "head, by its name"
    return "muon", "hidden matrix" if param.ndim == 2 else "stack of hidden matrices"


def heads_of(model: Module) -> dict[Module, str]:
    """The output heads, each with the reason.

    If no name says so, the last Linear is one: if its outputs are the vocabulary, which is the
    number of rows of the largest embedding, or if there is no embedding. Then so are the Linears
    right before it that read the same and put out less. The last one of a body without a head has
    a twin in another layer.
    """
    linears = {path: module for path, module in model.named_modules() if isinstance(module, Linear)}
    named = [module for path, module in linears.items() if re.fullmatch(HEAD, path)]
    heads: dict[Module, str] = dict.fromkeys(named, "head, by its name")
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, Embedding)]
    bare = any(re.fullmatch(HEAD, name) for name, _ in model.named_parameters())
    if linears and not heads and not bare:
        (path, last), *others = reversed(linears.items())
        layer = re.sub(r"\b\d+\.", "*.", path)
        twins = [each for name, each in others if re.sub(r"\b\d+\.", "*.", name) == layer]
        body = any(each.weight.shape == last.weight.shape for each in twins)
        if not body and (not sizes or last.out_features == max(sizes)):
            heads[last] = "head, the last Linear"
            for other_path, other in others:  # as a policy before a value
                beside = other_path.rpartition(".")[0] == path.rpartition(".")[0]
                numbered = re.search(r"\b\d+\b", other_path)
                if not beside or numbered or other.in_features != last.in_features:
                    break
                if other.out_features >= other.in_features:
                    break
                heads[other] = "head, beside the last Linear"
    return heads


def packing(name: str, shape: tuple[int, ...]) -> str:
    """The `split` of a parameter whose name says that it packs several matrices, or nothing."""
    rows, cols = shape[-2:]
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    for pattern, count, which in PACKED:
        if not re.fullmatch(pattern, leaf):
            continue
        split: Any = count  # it cuts the longer side
        if count == 3 and max(rows, cols) != 3 * min(rows, cols):
            split = "their rows"
        elif rows < cols and cols % rows:
            split = (rows // count,) * count
        return f", packs {which}: split={split}"
    return ""


def group_table(groups: Mapping[str, Iterable[Mapping[str, Any]]]) -> str:
    """Lines of optimizer, reason, how many of which shape, name. "*" is a layer's number.

    A name such as c_attn tells of packed matrices: the line ends with the `split` to give to them.
    Print it before you build the optimizers: they change the groups.
    """
    lines: Counter[tuple[str, str]] = Counter()
    for optimizer, found in groups.items():
        for group in found:
            for name, param in group["params"]:
                pattern = re.sub(r"\b\d+\b", "*", name)
                if optimizer == "muon" and "split" not in group:
                    pattern += packing(name, tuple(param.shape))
                lines[f"{optimizer:5} {group['name']:34}", f"{tuple(param.shape)} {pattern}"] += 1
    return "\n".join(f"{reason} {count:4} x {rest}" for (reason, rest), count in lines.items())
