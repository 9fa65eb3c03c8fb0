"""DeepSpeed's ZeRO 1, 2 and 3, with CPU offload, from a DeepSpeed configuration (`engine.deepspeed`).

Its values go to DeepSpeed as they are. Batch, clipping, optimizer and precision are this project's own keys, and filled
in from them, so that a point means the same under every engine: masters in fp32, compute under autocast.
"""

from __future__ import annotations

import json
import logging
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from eagle3_train.config import EngineConfig, OptimConfig
from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.train.distributed import World
from eagle3_train.train.engines.base import Engine, OptimizerState
from eagle3_train.train.losses import Objective
from eagle3_train.train.optim import make_optimizer

OURS = {
    "train_batch_size": "train.batch_tokens",
    "train_micro_batch_size_per_gpu": "train.micro_batch_tokens",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "gradient_clipping": "optim.clip_norm",
    "optimizer": "optim.*",
    "scheduler": "optim.decay",
    "fp16": "train.compute_dtype",
    "bf16": "train.compute_dtype",
    "torch_autocast": "train.compute_dtype",
}
# More than one: only then does DeepSpeed's CPU offload add gradients up. How many really are added up, the boundary
# below says: batches are counted in tokens here, so it varies from step to step.
ACCUMULATION = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


def deepspeed_config(cfg: EngineConfig, optim: OptimConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What DeepSpeed is given: `engine.deepspeed`, completed. ValueError where it sets what our own keys set, or no
    ZeRO stage."""
    given = cfg.deepspeed
    for key in given.keys() & OURS.keys():
        raise ValueError(f"engine.deepspeed.{key}: set {OURS[key]} instead, which holds for every engine")
    stage = given.get("zero_optimization", {}).get("stage")
    if stage not in (1, 2, 3):
        raise ValueError(f"engine.deepspeed.zero_optimization.stage={stage}: 1, 2 or 3; without ZeRO use engine=ddp")
    filled: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": optim.clip_norm,
        # With offload, ours (torch's fused AdamW, on the CPU) and not one that DeepSpeed would compile first.
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype != torch.float32:
        # By itself DeepSpeed sums the gradients of linear layers over ranks in `dtype` too; the other engines do it in
        # fp32. So do we, with no such modules.
        filled["torch_autocast"] = {"enabled": True, "dtype": str(dtype), "lower_precision_safe_modules": []}
    return filled | given


class DeepSpeed(Engine):
    def __init__(self, cfg: EngineConfig, head: Draft, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        self.take(cfg, head, optim, world, dtype)
        self.needs_several()
        config = deepspeed_config(cfg, optim, dtype)
        if find_spec("deepspeed") is None:
            raise ValueError("engine=deepspeed needs a package that is missing: pip install 'eagle3-train[deepspeed]'")
        # Of collectives that DeepSpeed calls: nothing that its user could change.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel(logging.WARNING)
        # On CPUs DeepSpeed would first compile shared-memory collectives: minutes, or for ever where a compiler that
        # was killed has left its lock. gloo does the same work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.optimizer = make_optimizer(optim, head.parameters())
        self.zero: Any  # what wraps the optimizer
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=head, optimizer=self.optimizer, config=json.loads(json.dumps(config)), dist_init_required=False
        )
        self.module = self.engine
        self._check(config)
        # A rank's loss is its share of the global sum already; DeepSpeed averages over ranks: take that back.
        self.gradient_factor = float(world.size)
        self._set_steps(0)  # some stages take one with no gradient, to allocate their state
        if self.engine.zero_optimization_stage() < 3:  # else only after the first step do parameters know their state
            self.zero._lazy_init_hp_params_optimizer_state()

    def _check(self, config: dict[str, Any]) -> None:
        """ValueError where DeepSpeed did not do what it was asked for."""
        asked = config["zero_optimization"]
        sizes = self.engine.dp_world_size, self.world.size
        if self.engine.zero_optimization_stage() != asked["stage"] or sizes[0] != sizes[1]:
            raise ValueError(
                f"engine=deepspeed asked for ZeRO stage {asked['stage']} on {sizes[1]} processes and got stage "
                f"{self.engine.zero_optimization_stage()} on {sizes[0]}: this DeepSpeed does not do it here"
            )
        masters = self._masters()
        held, whole = sum(m.numel() for m in masters), sum(_numel(p) for p in self.head.parameters())
        offload = asked.get("offload_optimizer", {}).get("device", "none") == "cpu"
        where = {m.device.type for m in masters}
        if held >= whole or {m.dtype for m in masters} != {torch.float32} or (offload and where != {"cpu"}):
            raise ValueError(
                f"engine=deepspeed: this rank holds {held} of {whole} master weights on {', '.join(where)}, which is "
                f"not what zero_optimization={asked} asks for"
            )

    def _masters(self) -> list[Tensor]:
        """This rank's flat pieces of the fp32 weights: what the inner optimizer updates, and where its state hangs."""
        stage3 = self.engine.zero_optimization_stage() == 3
        return list(self.zero.fp32_partitioned_groups_flat if stage3 else self.zero.single_partition_of_fp32_groups)

    def _set_steps(self, steps: int) -> None:
        """State of AdamW for every piece: as it is, zero where there is none; `steps` taken so far."""
        for master in self._masters():
            state = self.optimizer.state[master]
            for name in MOMENTS:
                state.setdefault(name, torch.zeros_like(master))
            state["step"] = torch.tensor(float(steps), device=master.device)

    def loss(self, batch: DraftBatch, objective: Objective) -> Tensor:
        return self.engine(batch, objective)  # it sets its own autocast, as `torch_autocast` says

    def backward(self, batch: DraftBatch, objective: Objective, last: bool) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        loss = self.loss(batch, objective)
        self.engine.backward(loss * self.gradient_factor, scale_wrt_gas=False)
        return loss.detach()

    def step(self, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()  # clips; drops an update whose norm is not finite
        return float(self.engine.get_global_grad_norm())

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p).cpu() for name, p in self.head.named_parameters()}

    def state(self) -> OptimizerState:
        """Whole tensors on every rank, gathered one by one: ZeRO cuts flat pieces, which have no names."""
        from deepspeed.utils import safe_get_full_optimizer_state

        step = self.optimizer.state[self._masters()[0]]["step"].cpu()
        return {
            name: {"step": step.clone()} | {m: safe_get_full_optimizer_state(p, m).cpu() for m in MOMENTS}
            for name, p in self.head.named_parameters()
        }

    def load(self, weights: dict[str, Tensor], state: OptimizerState) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for name, p in self.head.named_parameters():
            safe_set_full_fp32_param(p, weights[name].to(self.device))
            for moment in MOMENTS:
                safe_set_full_optimizer_state(p, state[name][moment].to(self.device), moment)
        self._set_steps(int(next(iter(state.values()))["step"]))
        self._publish()

    def _publish(self) -> None:
        """Copy the masters into the weights that the forward pass reads."""
        if self.engine.zero_optimization_stage() == 3:
            for read, master in zip(self.zero.fp16_partitioned_groups_flat, self._masters(), strict=True):
                read.data.copy_(master.data)
        else:
            self.zero.update_lp_params()


def _numel(parameter: torch.nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())
