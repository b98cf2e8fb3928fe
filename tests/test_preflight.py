"""``python -m mok_jax preflight``: it finds problems, all of them, and says what to do."""

import json

import jax
import pytest

from mok_jax import native, preflight, verify
from mok_jax.__main__ import main
from mok_jax.verify import Check
from support.processes import free_port, start_python


def findings(capsys):
    main(["preflight", "--json"])
    return {found["name"]: found for found in json.loads(capsys.readouterr().out)}


def test_a_machine_that_is_ready(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert main(["preflight"]) == preflight.READY
    printed = capsys.readouterr().out
    assert "PROBLEM" not in printed
    for text in ("jaxlib", f"interface {native.INTERFACE}", "72 x cpu, in 1 processes", "right in ", "NCCL_DEBUG"):
        assert text in printed
    found = findings(capsys)
    assert found["megakernel on 1 rank"]["found"] == found["megakernel on 72 ranks"]["found"] == "runs"


def test_every_problem_is_found(capsys, monkeypatch):
    """What is wrong with one probe does not keep others from theirs."""
    monkeypatch.setattr(native, "missing", lambda: ImportError("it was not built. Build it"))
    monkeypatch.setattr(verify, "verify", lambda request: iter([Check("dx", False, "0.3 from float64")]))
    monkeypatch.setattr(native, "check", lambda: (_ for _ in ()).throw(RuntimeError("GPU 0, rank 1 waited")))
    assert main(["preflight"]) == preflight.NOT_READY
    printed = capsys.readouterr().out
    assert printed.count("PROBLEM") == 3
    for text in ("extension                   it was not built\n", "dx: 0.3 from float64\n", "restart the process"):
        assert text in printed


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError("H is 20"), "refused: H is 20"), (OSError("no space"), "OSError: no space")]
)
def test_a_call_that_raises(capsys, monkeypatch, error, text):
    def fail(request):
        raise error

    monkeypatch.setattr(verify, "verify", fail)
    found = findings(capsys)["a call"]
    assert found["found"] == text and found["remedy"]


def test_sum_over_devices():
    assert preflight._sum_over_devices() == 72


def test_nccl_is_asked_where_there_are_several_gpus(capsys, monkeypatch):
    assert "NCCL" not in findings(capsys)
    gpus = [type("Gpu", (), {"platform": "gpu"})] * 2
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(preflight, "_sum_over_devices", lambda: 2.0)
    collective, found = preflight.probe_nccl()
    assert collective.found == "a sum over all devices is 2"
    assert found.name == "NCCL" and (found.found == "has windows") == (not found.remedy)


def test_several_processes():
    """On CPUs the ranks of the megakernel are of one process: that is said, and is no problem."""
    code = "import sys; from mok_jax.__main__ import main; sys.exit(main(sys.argv[1:]))"
    port = free_port()
    options = ["preflight", "--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id"]
    processes = [start_python(code, *options, str(process)) for process in range(2)]
    for process in processes:
        printed, errors = process.communicate(timeout=100)
        assert process.returncode == preflight.READY, printed + errors
        assert "in 2 processes; 1 are here" in printed and "xla runs instead: EP is 2, in 2 processes" in printed


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    assert main(["preflight"]) == preflight.READY, capsys.readouterr().out
