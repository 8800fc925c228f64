"""MoA's blocks: the router also gates experts that belong to no single projection (Cao et al., 2025).

The parallel bottleneck reads what the feed-forward reads and is added to what it returns; the prompt adds to what the
output projection of the attention reads. Both are hooks on modules that the model has, not new model code, and their
parameters hang on the block's first adapted projection, where PEFT saves them.

Shapes: B batch, T tokens, D hidden width, E experts of the block, the further ones last.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.tuner.call import hidden_states, running
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.placement import Block
from monkeyjump.tuner.routers.learned import LearnedRouterOfBlock
from monkeyjump.tuner.routers.moa_placement import Extra


class MoaRouter(LearnedRouterOfBlock):
    """A learned block router with a parallel bottleneck, a prompt, or both among its experts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.extras: dict[str, dict[str, int]] = {}  # adapter name -> kind -> position among the experts
        self.hooked: set[str] = set()
        self.attention: nn.Module | None = None

    def add(self, adapter_name: str, config: MonkeyJumpConfig, block: Block, layers: list[MonkeyJumpLayer]) -> None:
        super().add(adapter_name, config, block, layers)
        self.extras[adapter_name] = {}
        for position, extra in enumerate(block.extras, start=len(layers)):
            self.extras[adapter_name][extra.kind] = position
            if extra.kind not in self.hooked:
                self.hooked.add(extra.kind)
                self._hook(extra)

    def forget(self, adapter_name: str) -> None:
        super().forget(adapter_name)
        self.extras.pop(adapter_name, None)

    def _hook(self, extra: Extra) -> None:
        module = self.module.get_submodule(extra.module.removeprefix(f"{self.path}."))
        if extra.kind == "parallel":
            self._handles.append(module.register_forward_hook(self.beside_feed_forward, with_kwargs=True))
            return
        self.attention = module
        self._handles += [
            module.get_submodule("q_proj").register_forward_hook(self.after_query),
            module.get_submodule("o_proj").register_forward_pre_hook(self.before_output),
        ]

    def _with(self, kind: str) -> list[str]:
        """The active adapters that have this expert, in a block that has routed."""
        call = running().blocks
        gates = {} if call is None else call.gates
        return [name for name in self.active() if kind in self.extras[name] and name in gates]

    def _gate_of(self, name: str, kind: str) -> Tensor:
        return self.call().gates[name][..., self.extras[name][kind], None]

    def _own(self, name: str, added: Tensor, x: Tensor) -> Tensor:
        """`added` in the rows of this adapter; x in others, where rows have adapters of their own."""
        rows = self.call().call.row_adapters
        return added if rows is None else rows.chosen(name, added, x)

    def beside_feed_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        for name in self._with("parallel"):
            bottleneck = self.layers[name][0].monkeyjump_parallel[name]
            x = hidden_states(args, kwargs, self.path)
            added = output + bottleneck(x, self._gate_of(name, "parallel").to(x.device)).to(output.dtype)
            output = self._own(name, added, output)
        return output

    def after_query(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        if self._with("prompt"):
            self.call().queries = output

    def before_output(self, module: nn.Module, args: tuple) -> tuple | None:
        call = running().blocks
        queries = None if call is None else call.queries
        if call is None or queries is None or self.attention is None:
            return None
        call.queries = None
        x = args[0]
        for name in self._with("prompt"):
            expert = self.layers[name][0].monkeyjump_prompt[name]
            prompt = expert.prompt.to(x.dtype)
            k, v = (_frozen(self.attention.get_submodule(side))(prompt) for side in ("k_proj", "v_proj"))
            added = x + expert(queries, k, v, self._gate_of(name, "prompt").to(x.device)).to(x.dtype)
            x = self._own(name, added, x)
        return (x, *args[1:])


def _frozen(projection: nn.Module) -> nn.Module:
    return projection.get_base_layer() if isinstance(projection, MonkeyJumpLayer) else projection
