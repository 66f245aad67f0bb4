"""Extensions as candidates ask for them: `load_inline`, `load`, and `import cuda_extension`.

Knows what PyTorch would compile for each, and asks the judge to build just that. Must not compile anything itself: this
process may start no program.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

LAYOUT = "cuda_extension"
"""Module of CUDA Agent's layout: what its compile.sh makes of the sources in the folder and in kernels/."""

Spec = dict[str, Any]
Ask = Callable[[Spec], str]
"""Asks for a build; the path of the library."""


def _texts(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(v) for v in value]


def inline(
    name: str,
    cpp_sources: Any,
    cuda_sources: Any = None,
    functions: Any = None,
    extra_cflags: Any = None,
    extra_cuda_cflags: Any = None,
    extra_ldflags: Any = None,
    extra_include_paths: Any = None,
    with_cuda: Any = None,
    with_pytorch_error_handling: bool = True,
    no_implicit_headers: bool = False,
    **_others: Any,
) -> Spec:
    """What `torch.utils.cpp_extension.load_inline` would compile."""
    cpp, cuda = _texts(cpp_sources), _texts(cuda_sources)
    if not no_implicit_headers:
        cpp.insert(0, "#include <torch/extension.h>")
    if functions is not None:
        if isinstance(functions, str):
            functions = [functions]
        named = functions if isinstance(functions, dict) else {f: f for f in functions}
        cpp.append("PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {")
        for function, text in named.items():
            made = f"torch::wrap_pybind_function({function})" if with_pytorch_error_handling else function
            cpp.append(f'm.def("{function}", {made}, "{text}");')
        cpp.append("}")
    sources = {"main.cpp": "\n".join(cpp)}
    if cuda:
        if not no_implicit_headers:
            cuda[:0] = ["#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>"]
        sources["cuda.cu"] = "\n".join(cuda)
    return {
        "name": str(name),
        "sources": sources,
        "files": {},
        "cflags": _texts(extra_cflags),
        "cuda_cflags": _texts(extra_cuda_cflags),
        "ldflags": _texts(extra_ldflags),
        "include": _texts(extra_include_paths),
        "cuda": bool(cuda) if with_cuda is None else bool(with_cuda),
    }


def of_files(
    files: dict[str, str],
    root: str,
    name: str,
    sources: Any,
    extra_cflags: Any = None,
    extra_cuda_cflags: Any = None,
    extra_ldflags: Any = None,
    extra_include_paths: Any = None,
    with_cuda: Any = None,
    **_others: Any,
) -> Spec:
    """What `torch.utils.cpp_extension.load` would compile of the candidate's own files."""
    chosen: dict[str, str] = {}
    for source in _texts(sources):
        path = os.path.normpath(os.path.join(root, source))
        inside = os.path.relpath(path, root)
        if inside.startswith("..") or not os.path.isfile(path):
            raise FileNotFoundError(f"{source} is no file of the candidate")
        with open(path, encoding="utf-8") as file:
            chosen[inside] = file.read()
    cuda = any(n.endswith((".cu", ".cuh")) for n in chosen)
    headers = {n: t for n, t in files.items() if n.endswith((".h", ".hpp", ".cuh", ".inl")) and n not in chosen}
    return {
        "name": str(name),
        "sources": chosen,
        "files": headers,
        "cflags": _texts(extra_cflags),
        "cuda_cflags": _texts(extra_cuda_cflags),
        "ldflags": _texts(extra_ldflags),
        "include": [os.path.relpath(os.path.join(root, p), root) for p in _texts(extra_include_paths)],
        "cuda": cuda if with_cuda is None else bool(with_cuda),
    }


def layout(files: dict[str, str], root: str, device: str) -> Spec:
    """What CUDA Agent's compile.sh compiles: all of the folder and of kernels/, with its flags; those of the CPU device there."""
    sources = [n for n in sorted(files) if re.fullmatch(r"(kernels/)?[^/]+\.(cu|cpp)", n)]
    flags = ["-O3", "-fopenmp"] if device == "cpu" else ["-O3"]
    cuda_flags = ["-O3", "--use_fast_math"]
    return of_files(files, root, LAYOUT, sources, extra_cflags=flags, extra_cuda_cflags=cuda_flags)


def imported(name: str, path: str) -> ModuleType:
    """The module in a built library."""
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{name} is no module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class _Layout(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `cuda_extension`, built when it is first imported."""

    def __init__(self, files: dict[str, str], root: str, device: str, ask: Ask) -> None:
        self._files, self._root, self._device, self._ask = files, root, device, ask

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for that one name."""
        return importlib.util.spec_from_loader(fullname, self) if fullname == LAYOUT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The built module itself."""
        return imported(LAYOUT, self._ask(layout(self._files, self._root, self._device)))

    def exec_module(self, module: ModuleType) -> None:
        """It has run already."""


def install(files: dict[str, str], root: str, device: str, ask: Ask) -> None:
    """From now on extensions are built by `ask`."""

    def finished(spec: Spec, others: dict[str, Any]) -> Any:
        path = ask(spec)
        if others.get("is_python_module", True):
            return imported(spec["name"], path)
        torch.ops.load_library(path)
        return path

    def load_inline(name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any) -> Any:
        # After the sources PyTorch has SYCL's, then what is named here.
        names = ("sycl_sources", "functions", "extra_cflags", "extra_cuda_cflags")
        kwargs.update(zip(names, args, strict=False))
        return finished(inline(name, cpp_sources, cuda_sources, **kwargs), kwargs)

    def load(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(("extra_cflags", "extra_cuda_cflags"), args, strict=False))
        return finished(of_files(files, root, name, sources, **kwargs), kwargs)

    extensions: Any = torch.utils.cpp_extension
    extensions.load_inline = load_inline
    extensions.load = load
    if any(n.startswith("kernels/") or n == "binding.cpp" for n in files):
        sys.meta_path.insert(0, _Layout(files, root, device, ask))
