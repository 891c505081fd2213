"""One optimizer for a whole model: NorMuon for hidden matrices, AdamW for the rest, and a guard."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo as run_eagerly
from torch.nn import Module

from .adam import AdamW
from .base import ShardedOptimizer
from .groups import Row, groups_for
from .guards import TAKEN, Guard, Skip, SpikeRule, one_number
from .muon import Muon, NorMuon
from .notice import Notice
from .state import names_of, params_of, require_entries

COMMON = ("process_group", "grad_divisor", "compiled", "cautious")  # options of both halves


class MuonWithAdamW(torch.optim.Optimizer):
    """NorMuon for the hidden matrices of a model and AdamW for all else, behind one guard.

    params: a model, sorted by `groups_for` with `rows`; or groups that say use_muon=True or False,
    as those of KellerJordan's MuonWithAuxAdam. Steps of both halves are equally long, so one lr,
    tuned for AdamW, serves both; adam_lr: another for AdamW. betas and eps are AdamW's. muon: the
    class for matrices. nonfinite, spike, clip: of `Guard`, which skips a bad step whole.
    process_group, grad_divisor, compiled and cautious go to both halves, other options to Muon's.

    `guard.explain(verdict)` says why the latest step was skipped; the first one is a warning on
    rank 0. Before any step, and after `reset`, the verdict is that of a taken step. `parts` are the
    two optimizers, whose groups are those of `param_groups`.
    `latest_loss`: set it before a step that its trainer calls without arguments.
    ValueError for an impossible setting, or a group without use_muon.
    """

    guard: Guard
    verdict: Tensor  # of the latest step that was not left out, as GradScaler does

    def __init__(
        self,
        params: Module | Iterable[Any],
        lr: float,
        *,
        rows: Iterable[Row] = (),
        adam_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        scale: str = "rms",
        muon: Callable[..., Muon] = NorMuon,
        nonfinite: bool = True,
        spike: SpikeRule | None = None,
        clip: float | None = None,
        **options: Any,
    ):
        common = {name: options[name] for name in COMMON if name in options}
        own = {"momentum": momentum, "scale": scale, "weight_decay": weight_decay, **options}
        adam = {"betas": betas, "eps": eps, "weight_decay": weight_decay, **common}
        self._kinds: dict[bool, Callable[..., ShardedOptimizer]] = {
            True: partial(muon, lr=lr, **own),
            False: partial(AdamW, lr=lr if adam_lr is None else adam_lr, **adam),
        }
        self._halves: dict[bool, ShardedOptimizer] = {}
        self._guard = partial(Guard, nonfinite=nonfinite, spike=spike, clip=clip)
        self.latest_loss: Tensor | float | None = None
        if isinstance(params, Module):
            params = sorted_groups(params, rows)
        elif [*rows]:
            raise ValueError("rows sort the parameters of a model; give the model, not groups")
        # torch's OneCycleLR and CyclicLR ask for a default momentum. Only Muon reads it.
        super().__init__(params, {"momentum": momentum})
        self._follow()

    # ---- groups and halves

    @property
    def parts(self) -> list[ShardedOptimizer]:
        """The optimizers of the matrices and of the rest; an empty one is left out."""
        return [*self._halves.values()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group that says use_muon=True or False; see `ShardedOptimizer` for when."""
        self._require_kind(param_group)
        given, first = param_group["params"], len(params_of(self))
        given = [given] if isinstance(given, Tensor) else list(given)
        if "param_names" not in param_group and not any(isinstance(each, tuple) for each in given):
            given = [(str(number), param) for number, param in enumerate(given, first)]
        param_group["params"] = given  # named by their place in the whole, so that halves differ
        super().add_param_group(param_group)

    def _require_kind(self, group: Mapping[str, Any]) -> None:
        """ValueError unless a group says use_muon and its half exists or may still be built."""
        use_muon = group.get("use_muon")
        if not isinstance(use_muon, bool):
            fix = "set it to True for hidden matrices and False for the rest, or give the model"
            raise ValueError(f"a group of MuonWithAdamW needs use_muon; {fix}")
        if use_muon not in self._halves and any(half.stepped for half in self.parts):
            what = f"MuonWithAdamW has stepped without groups of use_muon={use_muon}"
            fix = "add one before the first step, or after reset(), which forgets all state"
            raise ValueError(f"{what}; {fix}")

    def _follow(self) -> None:
        """Give each half its groups as they are now, also those that are new.

        ValueError, with nothing changed, if a half lost its last parameter or comes after a step.
        """
        halves = len(self._halves)
        for group in self.param_groups:
            self._require_kind(group)
        kept = {group["use_muon"] for group in self.param_groups if group["params"]}
        for use_muon in self._halves.keys() - kept:
            what = f"no parameter of MuonWithAdamW has use_muon={use_muon} any longer"
            raise ValueError(f"{what}; put its groups back, or build the optimizer anew")
        for use_muon, kind in self._kinds.items():
            own = [group for group in self.param_groups if group["use_muon"] == use_muon]
            if use_muon in self._halves:
                half = self._halves[use_muon]
                half.param_groups = own
                for group in own:
                    for name, value in half.defaults.items():
                        group.setdefault(name, value)
            elif own:
                self._halves[use_muon] = kind(own)
        if len(self._halves) > halves:
            device = params_of(self)[0].device
            self._halves = dict(sorted(self._halves.items(), reverse=True))
            self.guard = self._guard(self.parts)
            self.verdict = self.guard.taken()
            self._notice = Notice(torch.zeros(3, dtype=torch.float64, device=device))
        # Names alone, as in the halves: torch.distributed.checkpoint looks whether there are any.
        self.state = defaultdict(dict)
        for half in self.parts:
            self.state.update(half.state)

    # ---- a step

    @run_eagerly  # see ShardedOptimizer.step
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: Tensor | float | None = None,
    ) -> Any:
        """Step every parameter that has a gradient, or none. Returns what the closure returns.

        loss: for the spike rule; without one `latest_loss`, then the closure's; without any, the
        rule judges gradient norms alone. It judges the mean over the ranks of fully_shard or
        process_group, else, as with DDP, over all ranks, so each must give one. Collective.
        """
        with torch.enable_grad():
            returned = closure() if closure is not None else None
        own = float(returned) if isinstance(returned, Real) else returned
        own = own if isinstance(own, (Tensor, float)) else None
        given = [each for each in (loss, self.latest_loss, own) if each is not None]
        self.latest_loss = None  # a stale one would be judged twice
        self._follow()
        self.verdict = self.guard.step(self._mean(given[0]) if given else None)
        skip = torch.where(self.verdict[0] != TAKEN, self.verdict[:3], 0)
        self._notice.hear(skip, self.parts[0].ranks, self._describe_skip)
        return returned

    def _mean(self, loss: Tensor | float) -> Tensor | None:
        """The mean over the ranks: if each judged its own loss, they would part."""
        if self.guard.spike is None:
            return None
        device = params_of(self)[0].device
        mean = one_number(loss).to(device, torch.float32, copy=True)
        if dist.is_available() and dist.is_initialized():
            group = self.parts[0].ranks.group  # None, as with DDP: all ranks
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
        return mean

    def _describe_skip(self, verdict: Tensor) -> str:
        guard, value, tensor = self.guard.explain(verdict) or Skip("", 0, None)
        what = f"the gradient of {tensor} is not finite" if tensor else "the loss or a norm spiked"
        later = "optimizer.guard.explain(optimizer.verdict) tells of each. Said once."
        return f"MuonWithAdamW skipped a step: {what} ({guard}: {value:.4g}); {later}"

    def describe(self) -> str:
        """What each half steps, by which products, and what is guarded."""
        self._follow()
        return self.guard.describe()

    # ---- state

    def __getstate__(self) -> dict[str, Any]:
        """Refuse pickle and deepcopy, as the halves do."""
        raise TypeError("MuonWithAdamW cannot be copied; copy its state_dict() instead")

    def reset(self) -> None:
        """Set all state to zero, in place."""
        for half in self.parts:
            half.reset()
        self.guard.reset()
        self.verdict = self.guard.taken()

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's form, and the guard's, equal on all ranks. Collective."""
        self._follow()
        following = count()
        numbers = {
            id(each): [next(following) for _ in each["params"]] for each in self.param_groups
        }
        state: dict[int, dict[str, Tensor]] = {}
        groups: dict[int, dict[str, Any]] = {}
        for half in self.parts:
            saved = half.state_dict()
            for group, packed in zip(half.param_groups, saved["param_groups"], strict=True):
                new = numbers[id(group)]
                pairs = zip(packed["params"], new, strict=True)
                state |= {to: saved["state"][own] for own, to in pairs if own in saved["state"]}
                groups[id(group)] = {**packed, "params": new}
        ordered = [groups[id(group)] for group in self.param_groups]
        return {"state": state, "param_groups": ordered, "guard": self.guard.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of any world size, by position, or one of MuonWithAuxAdam.

        One without a guard's state, as torch.distributed.checkpoint keeps, empties its windows.
        ValueError, with nothing loaded, as for the halves.
        """
        self._follow()
        require_entries(state_dict)
        saved = state_dict["param_groups"]
        kinds, own = ([each.get("use_muon") for each in of] for of in (saved, self.param_groups))
        if kinds != own:
            raise ValueError(f"the state has groups of use_muon {kinds}, not {own}; group alike")
        found = []
        for use_muon, half in self._halves.items():
            groups = [each for each in saved if each["use_muon"] == use_muon]
            others = {
                key for each in saved if each["use_muon"] != use_muon for key in each["params"]
            }
            state = {key: kinds for key, kinds in state_dict["state"].items() if key not in others}
            found.append(half.read({"state": state, "param_groups": groups}))
        if "guard" in state_dict:
            self.guard.load_state_dict(state_dict["guard"])
        else:
            self.guard.reset()
        for half, (tensors, groups) in zip(self.parts, found, strict=True):
            half.take(tensors, groups)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ("parameter.state", whole tensor) pairs of both halves. Collective."""
        self._follow()
        for half in self.parts:
            yield from half.named_state()

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a `named_state`. ValueError, with nothing loaded, if it does not fit."""
        self._follow()
        names = {name: half for half in self.parts for name in names_of(half)}
        parts: dict[ShardedOptimizer, dict[str, Tensor]] = {half: {} for half in self.parts}
        for key, tensor in tensors.items():
            half = names.get(key.rpartition(".")[0], self.parts[0])  # which refuses unknown ones
            parts[half][key] = tensor
        for half, own in parts.items():
            half.require_state(own)
        for half, own in parts.items():
            half.load_some(own)

    def load_some(self, tensors: Mapping[str, Tensor]) -> None:
        """Load those of a `named_state` that are given, unchecked."""
        for half in self.parts:
            half.load_some(tensors)


def sorted_groups(model: Module, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The groups of `groups_for`, each with use_muon. ValueError if there is nothing to train."""
    found = groups_for(model, rows)
    groups = [{**group, "use_muon": kind == "muon"} for kind in found for group in found[kind]]
    if not groups:
        what = f"{type(model).__name__} has no parameter that requires a gradient"
        raise ValueError(f"{what}; unfreeze one before you build its optimizer")
    return groups
