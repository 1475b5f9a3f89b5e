"""The real SGLang server on a CPU, from wheels alone.

Takes the arguments of `python -m sglang.launch_server` and runs the same server. The wheel of
torchvision links CUDA's libraries, so that beside a CPU build of torch its operators do not load
and its Python part cannot be imported. Two of them are declared here, without an implementation:
nothing that serves a text model calls them. Children of the server import this file again, as
`__mp_main__`, and so declare them too; what serves is therefore under `__main__` alone.

With TRITON_INTERPRET=1 SGLang's Triton kernels run on the CPU. Triton's interpreter keeps bfloat16
as its bits and multiplies matrices of these as integers; they are made float32 before.
"""

import os

import torch

if not torch.version.cuda:
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    _product = InterpreterBuilder.create_dot

    def _as_numbers(builder: InterpreterBuilder, tensor: TensorHandle) -> TensorHandle:
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        return builder.create_fp_ext(tensor, tl.float32)

    def _product_of_numbers(self, a, b, *others):
        return _product(self, _as_numbers(self, a), _as_numbers(self, b), *others)

    InterpreterBuilder.create_dot = _product_of_numbers

if __name__ == "__main__":
    import sys

    from sglang.launch_server import prepare_server_args, run_server
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
