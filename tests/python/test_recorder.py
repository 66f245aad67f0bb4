"""What an honest candidate for a GPU may write, and what it is told when no plan can say what it wrote.

All of it is recorded for `cuda` on a machine whose GPU, if it has one, is hidden.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from recording import PYTHON, Recorder, request_for

TASK = ModuleType("task")
exec(
    """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 16)
        self.bn = nn.BatchNorm1d(16)
        self.e = nn.Embedding(5, 8)
        self.conv = nn.Conv2d(3, 4, 3)
        self.lstm = nn.LSTM(8, 4)


def get_inputs():
    return [torch.rand(4, 8), torch.rand(2, 3, 6, 6)]


def get_init_inputs():
    return []
""",
    TASK.__dict__,
)

CANDIDATE = """
import copy
import ctypes

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import kernelfleet_ext as kf

k = kf.load("kernels/a.cu")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 16)
        self.bn = nn.BatchNorm1d(16)
        self.e = nn.Embedding(5, 8)
        self.conv = nn.Conv2d(3, 4, 3)
        self.lstm = nn.LSTM(8, 4)
        INIT

    def forward(self, x, im):
        y = torch.empty(4, 16, device=x.device)
        BODY
        k.run[1, 32](x, y)
        return y
"""


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


def record(recorder: Recorder, init: str, body: str, **more: Any) -> dict[str, Any]:
    lines = "\n".join("        " + line for line in body.strip().splitlines()).strip() or "pass"
    text = CANDIDATE.replace("INIT", "\n        ".join(init.splitlines()) or "pass").replace("BODY", lines)
    request, fds = request_for(TASK, {"model_new.py": text, "kernels/a.cu": ""}, "cuda", **more)
    return recorder.record(request, fds, seconds=30)[0]


# name: (constructor, forward before the last launch, nodes, constants)
HONEST = {
    "moved_to_cuda_in_the_constructor": (
        """
self.cuda()
self.to('cuda')
self.w=torch.zeros(3, device='cuda')
self.b=torch.tensor([1.,2.]).cuda()
self.c=torch.arange(4, device='cuda:0')
assert self.b.is_cuda
""",
        """
assert self.w.is_cuda and self.c.device==x.device
k.run[1,1](self.w,self.b,self.c)
""",
        3,
        2,
    ),
    "half_parameters": ("self.half()", "k.run[1,1](self.fc.weight)", 2, 1),
    "channels_last_parameters": (
        "self.to(memory_format=torch.channels_last)",
        """
assert self.conv.weight.is_contiguous(memory_format=torch.channels_last)
k.run[1,1](self.conv.weight)
""",
        2,
        1,
    ),
    "views": (
        "",
        """
a=x.view(2,16)
b=x.t()
c=x[:,::2]
d=x.expand(3,4,8)
e=x.unbind(0)
f=x.chunk(2,1)
g=x.split([3,5],1)
h=x[None].squeeze(0).flatten()
i=x.permute(1,0)
j=x.narrow(0,1,2)
l=x.unfold(1,2,2)
m=x.movedim(0,1)
n=x.diagonal()
o=x.reshape(2,2,8)
p=x.T
q=x.mT
r=x.swapaxes(0,1)
s=x.unflatten(1,(2,4))
t=x.as_strided((2,2),(8,1))
u=x.view(torch.int32)
v=x.select(0,1)
w=x[...,None]
z=torch.broadcast_to(x,(2,4,8))
aa=torch.atleast_3d(x)
bb=x.view_as(x)
cc=x.expand_as(x[None])
dd=x.ravel()
ee=torch.flatten(x)
ff=x.tensor_split(2)
gg=x.hsplit(2)
hh,ii=torch.broadcast_tensors(x,x[0])
jj=x.data
kk=x.detach()
ll=list(iter(x))
mm=x.real
assert len(x)==4
k.run[1,1](a,b,c,d,e[1],f[1],g[1],h,i,j,l,m,n,o,p,q,r,s,t,u,v,w,z,aa,bb,cc,dd,ee,ff[1],gg[1],hh,ii,jj,kk,ll[2],mm)
""",
        2,
        0,
    ),
    "factories": (
        "",
        """
a=x.new_empty(3)
b=x.new_zeros((2,2))
c=torch.ones_like(x)
d=torch.full((2,),3,device=x.device)
e=torch.full_like(x,float('-inf'))
f=x.new_full((2,),1.5)
g=torch.zeros_like(x,dtype=torch.int32,device=x.device)
h=torch.empty_strided((2,3),(1,2),device='cuda')
i=torch.zeros(4,device='cuda',dtype=torch.half)
j=x.new_ones(2)
l=kf.empty((2,2))
m=torch.empty_like(im,memory_format=torch.channels_last)
n=torch.empty((2,2),device=torch.device('cuda',0))
o=torch.zeros(3,dtype=torch.bool,device=x.device)
k.run[1,1](a,b,c,d,e,f,g,h,i,j,l,m,n,o)
""",
        11,
        0,
    ),
    "torch_cuda_functions": (
        "",
        """
torch.cuda.synchronize()
s=torch.cuda.current_stream()
p=torch.cuda.get_device_properties(x.device)
assert torch.cuda.is_available()
n=p.multi_processor_count
x2=x.cuda(non_blocking=True).to('cuda').to(device='cuda',dtype=torch.float32).to(x.device).to(x)
assert x.get_device()==0 and x.device.type=='cuda' and x.device.index==0
with torch.cuda.stream(torch.cuda.Stream()): k.run[n,1](x2, s.cuda_stream)
with torch.cuda.device(x.device), torch.no_grad(), torch.inference_mode(): k.run[1,1](x.contiguous(), x.float(), self.fc.weight.contiguous())
""",
        3,
        0,
    ),
    "default_device": (
        """
torch.set_default_device('cuda')
self.t=torch.ones(3)
self.r=torch.randn(4)
self.l=torch.linspace(0,1,5)
""",
        "k.run[1,1](self.t,self.r,self.l, torch.empty(3))",
        3,
        2,
    ),
    "work_on_parameters": (
        "",
        """
w=torch.cat([self.fc.weight, self.fc.weight*2])
v=torch.einsum('ij,kj->ik', self.fc.weight, self.fc.weight)
u=F.pad(self.fc.weight,(0,1))
s=torch.stack([self.bn.weight,self.bn.bias],1)
t=F.softmax(self.fc.weight,-1)
a=F.scaled_dot_product_attention(self.fc.weight[None],self.fc.weight[None],self.fc.weight[None])
f=torch.nn.utils.fusion.fuse_linear_bn_weights(self.fc.weight,self.fc.bias,self.bn.running_mean,self.bn.running_var,self.bn.eps,self.bn.weight,self.bn.bias)
q=self.fc.weight.half()
z=torch.empty_like(self.fc.weight).copy_(self.fc.weight)
zz=torch.zeros(20,8,device=x.device)
zz[:16]=self.fc.weight
n=self.fc.weight.abs().max()
o=self.fc.weight.cpu().numpy().shape
c=F.conv2d(self.conv.weight,self.conv.weight)
i=torch.linalg.inv(self.fc.weight.t()@self.fc.weight+torch.eye(8,device=x.device))
st=torch.where(self.fc.weight>0, self.fc.weight, torch.zeros_like(self.fc.weight))
nz=torch.tensor([1,2],device=x.device)
sc=self.fc.weight*torch.tensor(2.0,device='cuda')
ix=self.fc.weight[torch.arange(3,device=x.device)]
k.run[1,1](w,v,u,s,t,a,f[0],f[1],q,z,zz,n,c,i,st,nz,sc,ix)
""",
        2,
        18,
    ),
    "recurrent_weights": (
        "",
        """
k.run[1,1](self.lstm.weight_ih_l0, *[w for w in self.lstm.all_weights[0]], self.lstm(self.fc.weight)[0])
""",
        2,
        1,
    ),
    "fills": (
        "",
        """
y.zero_()
y.fill_(3)
y[:,1]=2.0
y[0]=torch.tensor(1.0,device=x.device)
z=torch.empty(3,4,device='cuda')
z[1:]=-1
z[:, 1:3].fill_(2)
k.run[1,1](z)
""",
        12,
        0,
    ),
    "autocast": (
        "",
        """
with torch.autocast('cuda', dtype=torch.float16): k.run[1,1](x)
with torch.profiler.record_function('a'): pass
""",
        2,
        0,
    ),
    "copied_layers": ("self.fc2=[copy.deepcopy(self.fc)]", "k.run[1,1](self.fc2[0].weight)", 2, 1),
    "library_calls": (
        "",
        """
a=kf.matmul(x, self.fc.weight.t(), bias=self.fc.bias)
b=kf.conv(im, self.conv.weight, self.conv.bias, padding=1)
c=kf.conv(im.permute(0,2,3,1).reshape(2,3,6,6) if False else torch.empty_like(im,memory_format=torch.channels_last), self.conv.weight)
assert c.is_contiguous(memory_format=torch.channels_last)
k.run[1,1](a,b,c)
""",
        5,
        1,
    ),
    "numpy_and_ctypes_arguments": (
        "",
        """
k.run[np.int64(2),(32,2)](np.float32(1), np.int32(2), ctypes.c_void_p(x.data_ptr()), ctypes.c_float(2), None, np.int64(4), np.uint8(3), np.float64(2), x.data_ptr()+8, True)
""",
        2,
        0,
    ),
    "dropout": (
        "self.d=nn.Dropout(0.5)",
        """
x=self.d(x)
x=nn.Identity()(x)
k.run[1,1](x)
""",
        2,
        0,
    ),
    "questions_about_a_tensor": (
        "",
        """
assert torch.is_tensor(x) and x.is_floating_point() and isinstance(self.fc.weight, nn.Parameter) and x.layout==torch.strided and not x.requires_grad and x.is_leaf and x.nbytes==128 and x.itemsize==4
id(x)
hash(x)
assert x is x
x.record_stream(torch.cuda.current_stream())
self.fc.weight.requires_grad
str(x.shape)
x.grad
""",
        1,
        0,
    ),
    "launch_spelt_out": (
        "",
        """
k.launch('run', grid=(4,2), block=128, shared=1024, cluster=(2,1,1), cooperative=False, args=[x,y])
""",
        2,
        0,
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_idiom_is_recorded(name: str, recorder: Recorder) -> None:
    init, body, nodes, constants = HONEST[name]
    reply = record(recorder, init.strip(), body)
    assert reply["ok"], reply
    assert (len(reply["plan"]["nodes"]), len(reply["constants"])) == (nodes, constants), reply["plan"]["nodes"]


# name: (constructor, forward, code, part of the message or the hint)
REFUSED = {
    "big_shared": ("", "k.run[1,1,300000](x)", "exception", "232448"),
    "bad_block": ("", "k.run[1,2048](x)", "exception", "between 1 and 1024"),
    "zero_grid": ("", "k.run[0,32](x)", "exception", "grid of run"),
    "float_grid": ("", "k.run[4/2,32](x)", "exception", "whole number"),
    "no_config": ("", "k.run(x)", "exception", "a grid and a block"),
    "inf": ("", "k.run[1,1](float('inf'))", "not_expressible", "INFINITY"),
    "strarg": ("", "k.run[1,1]('a')", "exception", "no tensor, number or None"),
    "lstm": ("", "self.lstm(x)", "framework_operator", "torch.lstm"),
    "ext": (
        "from torch.utils.cpp_extension import load_inline\nload_inline('a','b')",
        "",
        "not_expressible",
        "kf.load",
    ),
    "graph": ("", "g=torch.cuda.CUDAGraph()", "not_expressible", "CUDA graph"),
    "launch_init": ("k.run[1,1](self.fc.weight)", "", "not_expressible", "ModelNew is constructed"),
    "rand": ("", "k.run[1,1](torch.rand_like(x))", "framework_operator", "random"),
    "cpu": ("", "x.cpu()", "input_read", "copy to the CPU"),
    "topk": ("", "x.topk(2)", "framework_operator", "topk"),
    "mm_bad": ("", "kf.matmul(x,x)", "exception", "8 != 4"),
    "mm_dtype": ("", "kf.matmul(x,self.fc.weight.t().half())", "exception", "float16"),
    "conv_nc": ("", "kf.conv(im[:,:,::2],self.conv.weight)", "exception", "contiguous or channels-last"),
    "reshape_copy": ("", "x.t().reshape(-1)", "framework_operator", "strides"),
    "cai": ("", "x.__cuda_array_interface__", "not_expressible", "the tensor itself"),
    "setitem": ("", "y[:, :8]=x", "framework_operator", "copy_"),
    "setparam": ("", "y[:, 0]=self.bn.weight[:4]", "not_expressible", "written by PyTorch first"),
    "setparam1": ("", "k.run[1,1](y); y[:, 0]=self.bn.weight[0]", "framework_operator", "copy_"),
    "quant": ("", "torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)", "framework_operator", "quantize"),
    "sparse": ("", "x.to_sparse()", "framework_operator", "sparse"),
    "disable_modes": (
        "",
        "from torch.utils._python_dispatch import _disable_current_modes\nwith _disable_current_modes(): torch.relu(x)",
        "framework_operator",
        "relu",
    ),
    "fft": ("", "torch.fft.fft(x)", "framework_operator", "fft"),
    "cond": ("", "torch.cond(True, lambda a: a.relu(), lambda a: a, (x,))", "framework_operator", "relu"),
    "grad": ("", "torch.func.grad(lambda a: a.sum())(x)", "framework_operator", "sum"),
    "pow": ("", "x**2", "framework_operator", "pow"),
    "radd": ("", "1+x", "framework_operator", "add"),
    "neg": ("", "-x", "framework_operator", "neg"),
    "cmp": ("", "x>0", "framework_operator", "gt"),
    "branch": ("", "if x.sum() > 0: pass", "framework_operator", "decided in the kernel"),
    "branch_compared": ("", "if (x > 0): pass", "framework_operator", "decided in the kernel, for each element"),
    "branch_read": ("", "if x[0, 0]: pass", "input_read", "`if` can look at shapes, types and Python numbers alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_can_say_is_refused_with_line_and_reason(name: str, recorder: Recorder) -> None:
    init, body, code, part = REFUSED[name]
    reply = record(recorder, init, body)
    assert not reply["ok"] and reply["code"] == code, reply
    assert part in reply["message"] + reply.get("hint", "")
    assert reply["file"] == "model_new.py" and reply["source"], reply


def test_an_address_as_an_integer_is_its_buffer_and_offset(recorder: Recorder) -> None:
    reply = record(recorder, "", "k.run[1, 1](x.data_ptr() + 12, self.fc.weight[1:].data_ptr())")
    first, second = reply["plan"]["nodes"][0]["args"]
    kinds = [reply["plan"]["buffers"][argument["pointer"]["buffer"]]["kind"] for argument in (first, second)]
    assert kinds == [{"input": 0}, {"parameter": "fc.weight"}]
    assert (first["pointer"]["offset"], second["pointer"]["offset"]) == (12, 32)


def test_a_constant_changed_in_place_becomes_a_second_one(recorder: Recorder) -> None:
    reply = record(recorder, "", "w = self.fc.weight * 2\nk.run[1, 1](w)\nk.run[1, 1](w)\nw.mul_(2)\nk.run[1, 1](w)")
    buffers = [node["args"][0]["pointer"]["buffer"] for node in reply["plan"]["nodes"][:3]]
    assert buffers[0] == buffers[1] != buffers[2] and len(reply["constants"]) == 2


def test_a_parameter_changed_in_place_is_no_longer_that_parameter(recorder: Recorder) -> None:
    reply = record(recorder, "", "self.fc.bias.add_(1)\nk.run[1, 1](self.fc.bias, self.fc.weight)")
    kinds = [buffer["kind"] for buffer in reply["plan"]["buffers"][:2]]
    assert kinds == [{"constant": 0}, {"parameter": "fc.weight"}]


def test_the_store_of_a_plain_tensor_is_never_taken_for_that_of_another() -> None:
    import torch
    from kernelfleet_recorder.intercept import store_of
    from kernelfleet_recorder.session import Session

    session = Session("cpu", {})
    first = torch.tensor(0)
    store = store_of(session, first)
    assert store is not None
    store.storage = torch.tensor(1).untyped_storage()  # as loading a parameter does
    del first
    for _ in range(100):
        assert store_of(session, torch.tensor(2)) is not store


def test_a_library_that_the_task_does_not_allow_is_refused(recorder: Recorder) -> None:
    reply = record(recorder, "", "kf.conv(im, self.conv.weight)", libraries=["matmul"])
    assert reply["code"] == "library_not_allowed" and "kf.conv" in reply["message"]


def test_a_read_of_a_parameter_is_allowed_and_reported(recorder: Recorder) -> None:
    reply = record(recorder, "", "scale = self.fc.bias.sum().item()\nk.run[1, 1](x, scale)")
    assert reply["ok"] and len(reply["parameter_reads"]) == 1


def test_printing_is_kept_up_to_four_kibibytes(recorder: Recorder) -> None:
    reply = record(recorder, "", "print('hello', x.shape)\nprint('x' * 100000)")
    assert reply["stdout"].startswith("hello torch.Size([4, 8])") and len(reply["stdout"]) == 4096


def test_a_recorder_records_once(recorder: Recorder) -> None:
    child, _ = recorder.fork()
    child.settimeout(30)
    assert child.call({"op": "hello"})[0]["ok"]
    for expected in (True, False):
        text = CANDIDATE.replace("INIT", "pass").replace("BODY", "pass")
        request, fds = request_for(TASK, {"model_new.py": text, "kernels/a.cu": ""}, "cuda")
        assert child.call(request, fds)[0]["ok"] is expected
    child.close()


def test_outside_a_recording_a_launch_says_what_to_do() -> None:
    code = "import kernelfleet_ext as kf; kf.load('x.cu').run[1, 1](1)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(PYTHON)}, capture_output=True, text=True)
    assert done.returncode == 1 and "kernelfleet judge" in done.stderr
