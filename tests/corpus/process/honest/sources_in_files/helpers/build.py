import os

from torch.utils.cpp_extension import load

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ext = load(
    name="files", sources=[os.path.join(HERE, "kernels", "relu.cpp")], extra_cflags=["-O3", "-fopenmp"]
)
