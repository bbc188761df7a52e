"""What a GPU would run of compiled layers, made without one: Inductor's code, compiled to machine code by Triton.

Run as a process of its own, with `environment()`, a compute capability and cases; prints as JSON of each how many
graphs its layers are, how many kernels were compiled, and the bytes that they and the products move. Tensors are fake,
and torch is told of a GPU (`host_gpu.py`). `head` compiles what the output head runs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import host_gpu
import interpreter
import torch
from bitsandbytes.functional import QuantState

TOKENS = 256


def environment() -> dict[str, str]:
    """Variables of the process, with Triton and a library that is the GPU."""
    return {"PYTHONPATH": interpreter.paths(), **host_gpu.environment()}


def pretend(major: int, minor: int) -> None:
    """Has torch, its compiler and Triton see a GPU of a compute capability."""
    import triton.runtime
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import fuse_attention
    from torch._inductor.runtime import triton_helpers
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    card = host_gpu.properties(major, minor)  # What code is made of depends on the sizes.
    target = GPUTarget("cuda", 10 * major + minor, 32)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    interface = device_interface.CudaInterface

    class Nowhere(contextlib.nullcontext[None]):
        def __init__(self, device: Any = None) -> None:
            super().__init__()

    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "get_device_name": "GPU",
        "get_device_properties": card, "get_device_capability": (major, minor), "is_bf16_supported": True,
        "get_compute_capability": target.arch, "get_raw_stream": 0, "is_triton_capable": True, "exchange_device": 0,
        "maybe_exchange_device": 0, "_exchange_device": 0, "_maybe_exchange_device": 0, "_lazy_init": None,
        "raise_if_triton_unavailable": None, "get_rng_state": torch.empty(0), "set_rng_state": None,
    }  # fmt: skip
    for name, answer in answers.items():
        for owner in (torch.cuda, interface, interface.Worker):
            if hasattr(owner, name):
                setattr(owner, name, staticmethod(lambda *args, _answer=answer, **kwargs: _answer))
    torch.cuda.device = torch.cuda._DeviceGuard = interface.device = Nowhere  # type: ignore[assignment,misc]
    torch.version.cuda = "13.0"
    for each in vars(_triton).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
    # Its patterns are made of tensors on the GPU.
    fuse_attention._sfdp_init = lambda *args, **kwargs: None  # type: ignore[assignment]


class Code:
    """A backend of `torch.compile` that compiles kernels as Inductor does for a GPU, and runs none of them."""

    def __init__(self) -> None:
        self.kernels = self.products = self.moved = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor import compile_fx, config

        # Folding computes constants, and a cache would skip what is looked at here.
        with config.patch(joint_graph_constant_folding=False, fx_graph_cache=False, compile_threads=1):
            return compile_fx.compile_fx(graph, inputs, inner_compile=self._one_pass)

    def _one_pass(self, graph: Any, inputs: Any, **kwargs: Any) -> Any:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering

        def kernel(compiler: Any, name: str, source: str, device_str: str) -> Any:
            from torch._inductor.codecache import PyCodeCache

            found = getattr(PyCodeCache.load(source), name)
            found.precompile(warm_cache_only=True)  # As in the processes that compile beside the one that trains.
            self.kernels += 1
            return found

        def module(lowering: Any) -> Any:
            code, _ = lowering.codegen()
            for node in lowering.scheduler.nodes:
                size = int(node.get_read_write_buffers_sizes())
                if type(node).__name__ == "ExternKernelSchedulerNode":
                    self.products += size
                else:
                    self.moved += size
            exec(compile(code.value, "code", "exec"), {"__name__": "code"})
            raise _Done

        with (
            patch.object(GraphLowering, "compile_to_module", module),
            patch.object(AsyncCompile, "triton", kernel),
            patch.object(AsyncCompile, "wait", lambda *args: None),
        ):
            try:
                compile_fx_inner(copy.deepcopy(graph), inputs, **kwargs)
            except Exception as error:
                if not isinstance(error.__cause__ or error.__context__ or error, _Done):
                    raise

        def run(args: Any) -> Any:
            if kwargs.get("is_backward"):
                raise _Done
            return graph(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


class _Done(Exception):
    """All code of a pass is made."""


def outcome(method: dict[str, Any], scaling: str, elementwise: bool) -> dict[str, int]:
    """The code of a layer between others.

    Args:
        method: Of the recipe.
        scaling: Of products in fp8 that are trained; empty for none.
        elementwise: See `CompiledLayers`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from transformers import LlamaConfig

    from toolkit.models.compiled_layers import CompiledLayers
    from toolkit.models.quantization import fp8, fp8_products
    from toolkit.planner.trace import shallow
    from toolkit.planner.trace.setting import Setting

    torch._dynamo.reset()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 128}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2).to_dict()
    lora = method["name"] == "lora"
    setting = Setting(
        config=config, device="cuda", objective="language_modelling", method=method, load="bfloat16",
        local="float32" if lora else "bfloat16", autocast="bfloat16" if lora else None, attention="torch_varlen",
        layout="flat",
    )  # fmt: skip
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with patch.object(fp8, "has_products", lambda: True):
        model = shallow.build(setting, 3, fake).model
    base = model.get_base_model() if lora else model
    base.set_attn_implementation("torch_varlen")
    if scaling:
        fp8_products.multiply_in_fp8(model, scaling)
    code = Code()
    with fake:
        _to_gpu(model)
        layers = CompiledLayers(model, backend=code, elementwise=elementwise)
        with torch.device("cuda"), torch.autocast("cuda", torch.bfloat16, enabled=lora):
            rows = torch.empty(1, TOKENS, 256, dtype=torch.bfloat16, requires_grad=True)
            turns = tuple(torch.empty(1, TOKENS, 64, dtype=torch.bfloat16) for _ in range(2))
            ends, positions = torch.empty(5, dtype=torch.int32), torch.empty(1, TOKENS, dtype=torch.long)
            documents = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 128, "max_length_k": 128}
            layer = base.model.layers[1]
            found = layer(rows, position_embeddings=turns, position_ids=positions, **documents)
            try:
                found.sum().backward()
            except Exception as error:
                if not isinstance(error.__cause__ or error.__context__ or error, _Done):
                    raise
    return {"graphs": layers.graphs, "kernels": code.kernels, "moved": code.moved, "products": code.products}


def _to_gpu(model: torch.nn.Module) -> None:
    """Has the fake tensors of a model lie on the GPU."""

    def moved(each: torch.Tensor) -> torch.Tensor:
        return torch.empty(each.shape, dtype=each.dtype, device="cuda")

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            module._parameters[name] = there = torch.nn.Parameter(moved(parameter), parameter.requires_grad)
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                there.quant_state = module.quant_state = state  # type: ignore[attr-defined]
                there.bnb_quantized = True  # type: ignore[attr-defined]
            while isinstance(state, QuantState):
                for key, tensor in vars(state).items():
                    if isinstance(tensor, torch.Tensor):
                        setattr(state, key, moved(tensor))
                state = state.state2


def head(capability: str) -> dict[str, int]:
    """TRL's kernels as `fused_head` asks for them, in the type that such a GPU trains in."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from trl.kernels import chunked_logprob

    arch = int(capability.replace(".", ""))
    of_logits = "*fp16" if arch < 80 else "*bf16"
    whole = dict.fromkeys(("mm_stride", "vocab_start", "n_cols"), "i32")
    types = {"mm_ptr": of_logits, "targets_ptr": "*i64", **whole}
    types |= dict.fromkeys(("logit_scale", "softcap", "inv_t"), "fp32")
    asked = {f"HAS_{name.upper()}": False for name in chunked_logprob.OPTIONAL_OUTPUTS}
    passes = {
        chunked_logprob._forward_kernel: asked,
        chunked_logprob._backward_kernel: {"HAS_LOGPROB_GRAD": True, "HAS_ENTROPY_GRAD": False},
    }
    sizes = []
    for function, flags in passes.items():
        constants = {**flags, "HAS_SOFTCAP": True, "BLOCK_SIZE": chunked_logprob._BLOCK_SIZE}
        names = function.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
        source = ASTSource(function, signature, {(names.index(name),): each for name, each in constants.items()})
        sizes.append(len(triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["cubin"]))
    return {"kernels": len(sizes), "smallest": min(sizes)}


CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "full": ({"name": "full"}, "", False),
    "full, products in fp8": ({"name": "full"}, "tensorwise", False),
    "full, products in fp8 by row": ({"name": "full"}, "rowwise", True),
    "adapters": ({"name": "lora"}, "", False),
    "adapters, less kept": ({"name": "lora"}, "", True),
    "adapters, base in fp8": ({"name": "lora", "quantization": "fp8"}, "", False),
    "adapters, base in fp8, less kept": ({"name": "lora", "quantization": "fp8"}, "", True),
    "adapters, base in nf4": ({"name": "lora", "quantization": "nf4"}, "", False),
}

if __name__ == "__main__":
    capability, *names = sys.argv[1:]
    if names == ["head"]:
        sys.exit(print(json.dumps(head(capability))))

    import peft  # noqa: F401

    from toolkit.models.attention import attention_kernels
    from toolkit.planner.trace import fake_kernels  # noqa: F401

    attention_kernels.register()
    pretend(*map(int, capability.split(".")))
    print(json.dumps({name: outcome(*CASES[name]) for name in names}))
