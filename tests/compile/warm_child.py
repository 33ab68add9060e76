"""Warms weights up for an H200 in a process of its own, with a compiler that only counts, and prints what it counted.

    python warm_child.py WEIGHTS [MOST_ROWS]

WEIGHTS is a list of descriptions, as JSON; one with "block" stands for a block of gemmery.nn without its last layer,
and one with "experts" for gemmery.nn.Experts.
Printed are, for each, how many kernels serve it and with which configs, how many of them were compiled and had not been
for an earlier weight, how many more were when plans for random numbers of rows came afterwards, and the seconds that
warming up took per number of rows.
"""

import json
import random
import sys
import time

import torch
from torch import nn
from triton.runtime.jit import JITFunction

import gemmery
import gemmery.nn
from gemmery import devices
from gemmery.lab import targets
from gemmery.launch import direct
from gemmery.moe.experts import products_of
from gemmery.operands import Groups
from gemmery.product.run import plan as plan_of
from gemmery.product.spec import Functions, Options
from gemmery.schedules import any_width_binding
from gemmery.tuning import warm


class Kernel:
    """What a compiler would have made, without its code."""

    n_spills = n_regs = 0

    def __init__(self):
        self.asm = {"ptx": "", "llir": ""}

    def _init_handles(self):
        pass


def count_only(compiled):
    def compile_(self, key, signature, device, *arguments):
        compiled.append(f"{self.__name__} {key}")
        kernel = self.device_caches[device][0][key] = Kernel()
        return kernel

    JITFunction._do_compile = compile_


def block(description):
    """A block on the meta device, of which only the first product counts."""
    kind, sizes, options = description["block"], description["sizes"], description.get("options", {})
    made = getattr(gemmery.nn, kind)(*sizes, **options, dtype=torch.bfloat16, device="meta")
    made.down = nn.Identity()
    return made


def planned(made, M):
    """The plan that a call of a block makes for its first product, with tensors that are there."""
    how = made.fused_product()
    pair = isinstance(how.weight, tuple)
    # A pair lies farther apart than where it was warmed up; nobody touches the memory between.
    weight = torch.empty(
        (1 + 17 * pair, *(how.weight[0] if pair else how.weight).shape), dtype=torch.bfloat16
    )
    biases = [] if how.bias is None else how.bias if pair else [how.bias]
    return gemmery.plan(
        torch.empty(M, weight.shape[-1], dtype=torch.bfloat16),
        [weight[0].t(), weight[17].t()] if pair else weight[0].t(),
        bias=[torch.empty(one.shape, dtype=torch.bfloat16) for one in biases] or None,
        epilogue=how.epilogue,
        batch_invariant=how.batch_invariant,
    )


def planned_of_experts(made, M, top_k):
    """The plans of a call of experts for both products, with tensors that are there."""
    first, _, second = products_of(**made.given())
    plans = []
    for product, gathers in ((first, True), (second, False)):
        weight = product.weight
        rows, (count, _, columns) = M * top_k, weight.shape
        x = torch.empty(M if gathers else rows, columns, dtype=torch.bfloat16)
        offs, numbers = torch.empty(count, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
        groups = Groups(x, offs, "rows", numbers if gathers else None)
        bias = None if product.bias is None else product.bias.detach().unsqueeze(1)
        functions = Functions(product.epilogue)
        plans.append(plan_of("grouped_linear", groups, weight.detach(), bias, functions, None, Options()))
    return plans


def main():
    targets.use_target("sm_90")
    compiled = []
    count_only(compiled)
    devices.current = lambda device: devices.TABLE["NVIDIA H200"]
    # There is no code that it could launch, or look into.
    direct.prepare = lambda *given: None
    any_width_binding.check_memory = lambda *given: None
    weights, most = json.loads(sys.argv[1]), int((sys.argv[2:] or [8192])[0])
    reports = []
    for weight in weights:
        top_k = weight.get("top_k")
        if "experts" in weight:
            weight = gemmery.nn.Experts(*weight["experts"], bias=True, dtype=torch.bfloat16)
        else:
            weight = block(weight) if "block" in weight else weight
        compiled.clear()
        begun = time.perf_counter()
        found = gemmery.warmup(weight, max_m=most, workers=0, top_k=top_k)
        seconds = (time.perf_counter() - begun) / most / len(found)
        assert len(found) == (1 if top_k is None else 2)
        before = len(compiled)
        for M in random.Random(0).sample(range(1, most + 1), min(most, 200)):
            if top_k is not None:
                plans = planned_of_experts(weight, M, top_k)
            elif isinstance(weight, nn.Module):
                plans = [planned(weight, M)]
            else:
                (operand,) = warm._operands(weight, False)
                plans = [warm.fitted(operand.problem(M, devices.TABLE["NVIDIA H200"]))]
            assert all(isinstance(plan._compiled, Kernel) for plan in plans)
        reports.append(
            {
                "weights": len(found),
                "kernels": sum(len(warmed.kernels) for warmed in found),
                "configs": sorted({str(config) for warmed in found for config in warmed.kernels}),
                "compiled": before,
                "later": len(compiled) - before,
                "seconds": seconds,
            }
        )
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
