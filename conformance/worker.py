"""The process in which an implementation runs when it can't, or shall not, run in the harness's own.

One file for Python 3.6 and later, with numpy and whatever the implementation needs; nothing of this project is
imported. Requests and answers are lines of JSON on stdin and stdout, arrays are .npy files in a folder that the harness
names. A fork of the worker computes, from request to request: when it dies or hangs, the next one is there at once, and
the worker itself, which computes nothing, lives on.
"""

import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import platform
import re
import resource
import select
import shutil
import signal
import sys
import threading
import time
import types
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy

Json = Dict[str, Any]

QUANTITIES = ("output", "gradients", "double_backward")

# What a failed allocation is called by C++, Python, torch and others.
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|not enough memory|t allocate memory|out of memory|Cannot allocate", re.I
)


class Child:
    """A forked process that answers requests, JSON for JSON, until it is ended, dies or is too slow."""

    def __init__(self, handle: Callable[[Json], Json]) -> None:
        self.alive = True
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._requests)
            os.close(self._answers)
            _serve_as_child(handle, requests, answers)
        os.close(requests)
        os.close(answers)

    def ask(self, request: Json, time_limit_s: float, memory_limit: Optional[int] = None) -> Json:
        """What ``handle`` returns for the request.

        Else what came instead: {"raised": "Type: message"}, {"died": "SIGSEGV"}, {"left": exit status},
        {"late": time_limit_s} or {"memory": memory_limit}, which is in bytes beyond what the process had. After all of
        them but the first the child is gone.
        """
        line = json.dumps({"request": request, "memory_limit": memory_limit}).encode() + b"\n"
        deadline = time.monotonic() + time_limit_s
        answer = b""
        try:
            while line:
                line = line[os.write(self._requests, line) :]
            while not answer.endswith(b"\n"):
                ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    self.end()
                    return {"late": time_limit_s}
                part = os.read(self._answers, 1 << 16)
                if not part:
                    return self._died()
                answer += part
        except BrokenPipeError:
            return self._died()
        outcome: Json = json.loads(answer.decode())
        if memory_limit is not None and _NO_MEMORY.search(outcome.get("raised", "")):
            return {"memory": memory_limit}
        return outcome

    def end(self) -> int:
        """Kills the child, if it is alive, and returns its wait status."""
        self.alive = False
        os.close(self._requests)
        os.close(self._answers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return os.waitpid(self._pid, 0)[1]

    def _died(self) -> Json:
        # It closed its pipe a moment before its end.
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        status = self.end()
        if os.WIFSIGNALED(status):
            return {"died": signal.Signals(os.WTERMSIG(status)).name}
        return {"left": os.WEXITSTATUS(status)}


def _serve_as_child(handle: Callable[[Json], Json], requests: int, answers: int) -> None:
    def run() -> None:
        with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
            for line in lines:
                asked = json.loads(line)
                try:
                    _limit_memory(asked["memory_limit"])
                    answer = json.dumps(handle(asked["request"]))
                except Exception as error:
                    _limit_memory(None)
                    answer = json.dumps({"raised": f"{type(error).__name__}: {error}"})
                print(answer, file=out, flush=True)
        os._exit(0)

    try:
        # A crash is a result here, not something to be told on the terminal.
        faulthandler.disable()
        # OpenMP's threads belong to the one that started them and did not survive the fork: a new one has none yet.
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def _limit_memory(limit: Optional[int]) -> None:
    """Lets this process have so many bytes more than it has now; None: any number. Linux alone knows how."""
    if not os.path.exists("/proc/self/status"):
        return
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = most
    if limit is not None:
        with open("/proc/self/status") as file:
            has = 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmData"))
        wanted = has + limit if most == resource.RLIM_INFINITY else min(most, has + limit)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))


def write_tensor(tensor: Any, path: str) -> Json:
    """Writes what memory a torch tensor spans, and describes it: dtype, size and strides survive."""
    import torch

    device, tensor = str(tensor.device), tensor.detach().cpu()
    size, stride = list(tensor.shape), list(tensor.stride())
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if tensor.numel() else 0
    flat = tensor.as_strided((span,), (1,))
    if tensor.dtype == torch.bfloat16:  # which numpy does not have
        flat = flat.view(torch.int16)
    numpy.save(path, flat.numpy(), allow_pickle=False)
    return {
        "path": path,
        "dtype": str(tensor.dtype).replace("torch.", ""),
        "device": device,
        "size": size,
        "stride": stride,
    }


def read_tensor(described: Json) -> Any:
    """The torch tensor that was written, on the device where it was."""
    import torch

    flat = torch.from_numpy(numpy.load(described["path"], allow_pickle=False))
    if described["dtype"] == "bfloat16":
        flat = flat.view(torch.bfloat16)
    return flat.as_strided(described["size"], described["stride"]).to(described["device"])


def write_array(array: Any, path: str) -> Json:
    """Writes a numpy array as if it were a contiguous tensor."""
    array = numpy.ascontiguousarray(array)
    numpy.save(path, array.reshape(-1), allow_pickle=False)
    stride = [step // array.itemsize for step in array.strides]
    return {
        "path": path,
        "dtype": array.dtype.name,
        "device": "cpu",
        "size": list(array.shape),
        "stride": stride,
    }


def read_array(described: Json) -> Any:
    """The numpy array that was written; those of tensors keep their strides."""
    if described["dtype"] == "bfloat16":
        raise NotImplementedError("numpy has no bfloat16")
    flat = numpy.load(described["path"], allow_pickle=False)
    steps = [stride * flat.itemsize for stride in described["stride"]]
    return numpy.lib.stride_tricks.as_strided(flat, described["size"], steps)


class ByAutograd:
    """The quantities of a provider of torch operators, one method each, by the autograd of its own torch."""

    read, write = staticmethod(read_tensor), staticmethod(write_tensor)

    def computes(self, quantity: str) -> bool:
        """Nobody knows before it was tried."""
        return True

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        public = (name for name in dir(provider) if name[0] != "_" and name != "load")
        self.operators = [name for name in public if callable(getattr(provider, name))]

    def output(self, operator: str, tensors: Json, arguments: Json) -> Any:
        """The operator's result."""
        import torch

        with torch.no_grad():
            return self._apply(operator, tensors, arguments, [])[0]

    def gradients(
        self, operator: str, tensors: Json, arguments: Json, grad_output: Any, wanted: List[str]
    ) -> Json:
        """The gradients of the tensors of these names."""
        gradients, _ = self._first_order(operator, tensors, arguments, grad_output, wanted, False)
        return gradients

    def double_backward(
        self,
        operator: str,
        tensors: Json,
        arguments: Json,
        grad_output: Any,
        wanted: List[str],
        cotangents: Json,
    ) -> Json:
        """The gradients of <gradients, cotangents> by the tensors of these names and by grad_output."""
        import torch

        grad_output = grad_output.requires_grad_()
        gradients, leaves = self._first_order(operator, tensors, arguments, grad_output, wanted, True)
        pairs = [
            (gradient, cotangents[name])
            for name, gradient in gradients.items()
            if gradient is not None and name in cotangents
        ]
        if not any(gradient.requires_grad for gradient, _ in pairs):
            raise NotImplementedError("its gradients can't be differentiated")
        # backward() runs the whole graph: a node that refuses says so, where grad() would go around it.
        torch.autograd.backward([sum((gradient * cotangent).sum() for gradient, cotangent in pairs)])
        second = {name: leaves[name].grad for name in wanted}
        second["grad_output"] = grad_output.grad
        return second

    def _first_order(
        self,
        operator: str,
        tensors: Json,
        arguments: Json,
        grad_output: Any,
        wanted: List[str],
        create_graph: bool,
    ) -> Tuple[Json, Json]:
        import torch

        output, leaves = self._apply(operator, tensors, arguments, wanted)
        if not output.requires_grad:
            return dict.fromkeys(wanted), leaves
        gradients = torch.autograd.grad(
            output,
            [leaves[name] for name in wanted],
            grad_output,
            create_graph=create_graph,
            allow_unused=True,
        )
        return dict(zip(wanted, gradients)), leaves

    def _apply(self, operator: str, tensors: Json, arguments: Json, wanted: List[str]) -> Tuple[Any, Json]:
        """The output, and the leaves that it was computed from."""
        import torch

        operator_of = getattr(self._provider, operator)
        if "dtype" not in arguments:
            leaves: Json = {
                name: None if tensor is None else tensor.requires_grad_(name in wanted)
                for name, tensor in tensors.items()
            }
            return operator_of(**leaves, **arguments), leaves
        layer = operator_of(
            **dict(
                arguments, dtype=getattr(torch, arguments["dtype"]), device=torch.device(arguments["device"])
            )
        )
        layer.load_state_dict(
            {name: tensor for name, tensor in tensors.items() if name != "input"}, strict=True
        )
        leaves = dict(layer.named_parameters(), input=tensors["input"])
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in wanted)
        return layer(leaves["input"]), leaves


class ByItself:
    """The quantities of a provider that computes them from numpy arrays, as it offers them."""

    read, write = staticmethod(read_array), staticmethod(write_array)

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self.operators = list(provider.operators)

    def computes(self, quantity: str) -> bool:
        """Whether it has a method of this name."""
        return hasattr(self._provider, quantity)

    def __getattr__(self, quantity: str) -> Any:
        return getattr(self._provider, quantity)


def find_provider(spec: str) -> Any:
    """The object PROVIDER of a file, or the instance or class that MODULE:ATTRIBUTE names.

    A file may import its neighbours, by relative imports alone: their names are often those of the packages they call.
    """
    if spec.endswith(".py"):
        folder, name = os.path.split(spec)
        neighbours = types.ModuleType("gradparity_providers")
        neighbours.__path__ = [folder]
        sys.modules[neighbours.__name__] = neighbours
        found = importlib.import_module(f"{neighbours.__name__}.{name[:-3]}").PROVIDER
    else:
        module, _, attribute = spec.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    return found() if isinstance(found, type) else found


def introduce(spec: str) -> Tuple[Any, Json]:
    """The evaluator of a provider, and what the harness is told of it; {"unavailable": why} when there is none."""
    try:
        provider = find_provider(spec)
        version = str(provider.load())
    except Exception as error:
        clear = isinstance(error, ImportError) or type(error).__name__ == "UnavailableError"
        return None, {"unavailable": str(error) if clear else f"{type(error).__name__}: {error}"}
    evaluator: Any = ByItself(provider) if hasattr(provider, "output") else ByAutograd(provider)
    surroundings = ["Python " + platform.python_version()]
    if "torch" in sys.modules:
        surroundings.insert(0, "torch " + sys.modules["torch"].__version__)
    return evaluator, {
        "version": version,
        "surroundings": ", ".join(surroundings),
        "operators": evaluator.operators,
        "computes": [quantity for quantity in QUANTITIES if evaluator.computes(quantity)],
        "not_promised": dict(getattr(provider, "not_promised", {})),
    }


def answer(evaluator: Any, request: Json, folder: str) -> Json:
    """Computes what a request asks for."""
    tensors = {
        name: None if each is None else evaluator.read(each) for name, each in request["tensors"].items()
    }
    arguments = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in request["arguments"].items()
    }
    further: Json = {}
    if "grad_output" in request:
        further = {"grad_output": evaluator.read(request["grad_output"]), "wanted": request["wanted"]}
    if "cotangents" in request:
        further["cotangents"] = {name: evaluator.read(each) for name, each in request["cotangents"].items()}
    result = getattr(evaluator, request["quantity"])(request["operator"], tensors, arguments, **further)
    named = result if isinstance(result, dict) else {"output": result}
    paths = (os.path.join(folder, f"answer{number}.npy") for number in itertools.count())
    return {
        "tensors": {
            name: None if each is None else evaluator.write(each, path)
            for path, (name, each) in zip(paths, named.items())
        }
    }


def main(spec: str, folder: str) -> None:
    """Serves until stdin ends, which it does when the harness dies too; then the folder goes."""
    # What a library prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    evaluator, introduction = introduce(spec)
    print(json.dumps(introduction), file=answers, flush=True)
    child = None
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if child is None or not child.alive:
                child = Child(lambda request: answer(evaluator, request, folder))
            outcome = child.ask(asked["request"], asked["time_limit_s"], asked["memory_limit"])
            if asked["hostile"] and child.alive:  # nobody knows what it did to the memory
                child.end()
            print(json.dumps(outcome), file=answers, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
