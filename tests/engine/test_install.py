from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest

from fusepatch.engine import install, ledger
from fusepatch.engine.patch import Contract, Slot
from fusepatch.errors import FlagConflictError, StrictError
from kits.declarations import adding_hundred, passing, site


def load(name: str = "toylib.core") -> ModuleType:
    return importlib.import_module(name)


def test_a_wrapped_function_keeps_what_others_read_of_it(library: Callable[..., str]) -> None:
    module = load(library())
    original = module.scale
    install.install("p", site(), module, late=False)
    assert module.scale(3) == 106
    assert module.scale is not original
    assert inspect.signature(module.scale) == inspect.signature(original)
    assert inspect.getfullargspec(module.scale) == inspect.getfullargspec(original)
    assert (module.scale.__module__, module.scale.__qualname__, module.scale.__doc__) == (
        "toylib.core",
        "scale",
        "Multiply.",
    )
    assert type(module.scale) is type(original)
    assert pickle.loads(pickle.dumps(module.scale)) is module.scale
    assert copy.deepcopy(module.scale) is module.scale
    install.uninstall("p", site())
    assert module.scale is original


def test_the_wrapper_does_not_carry_what_tools_keep_on_the_original(library: Callable[..., str]) -> None:
    module = load(library())
    module.scale._torchdynamo_orig_callable = "the original"
    install.install("p", site(), module, late=False)
    assert "_torchdynamo_orig_callable" not in vars(module.scale)


@pytest.mark.parametrize(("path", "kind"), [("Model.double", staticmethod), ("Model.named", classmethod)])
def test_static_and_class_methods_stay_what_they_are(library: Callable[..., str], path: str, kind: type) -> None:
    module = load(library())
    name = path.partition(".")[2]
    raw = vars(module.Model)[name]
    seen = []

    def handler(proceed, *args, **kwargs):
        seen.append(args)
        return proceed(*args, **kwargs)

    install.install("p", site(Slot(path, handler)), module, late=False)
    assert isinstance(vars(module.Model)[name], kind)
    assert module.Model.double(4) == 8
    assert module.Model.named(4) == ("Model", 4)
    assert seen == ([(4,)] if kind is staticmethod else [(module.Model, 4)])
    install.uninstall("p", site(Slot(path, handler)))
    assert vars(module.Model)[name] is raw


def test_taking_out_an_inherited_method_deletes_the_copy(library: Callable[..., str]) -> None:
    module = load(library())
    inherited = site(Slot("Model.__init__", passing, Contract(parameters=("size",))))
    install.install("p", inherited, module, late=False)
    assert "__init__" in vars(module.Model)
    assert module.Model(3).size == 3
    install.uninstall("p", inherited)
    assert "__init__" not in vars(module.Model)
    module.Base.__init__ = lambda self, size: setattr(self, "size", size * 2)
    assert module.Model(3).size == 6, "a copy left on the subclass would hide a later change of the base"


def test_the_class_itself_stays_the_same_object(library: Callable[..., str]) -> None:
    module = load(library())
    early = module.Model
    install.install("p", site(Slot("Model.forward", adding_hundred)), module, late=False)
    assert module.Model is early
    assert type(early(1)) is module.Model
    assert early(1).forward(1) == 102, "instances made through an early-bound class name are patched too"
    assert pickle.loads(pickle.dumps(early)) is early


def test_values_of_named_mappings_follow(library: Callable[..., str]) -> None:
    module = load(library())
    original = module.TABLE["a"]
    every = site(Slot("scale*", adding_hundred, Contract(parameters=("value",))), mappings=("TABLE",))
    applied = install.install("p", every, module, late=False)
    assert applied.slots == ("scale", "scale_more")
    assert module.TABLE["a"] is module.scale
    assert module.TABLE["b"](1) == 103
    install.uninstall("p", every)
    assert module.TABLE["a"] is original
    assert module.scale is original


def test_a_pattern_takes_functions_of_the_module_itself_whose_contract_holds(library: Callable[..., str]) -> None:
    source = "from os.path import join as scale_join\ndef scale_a(value): return value\ndef scale_b(): return 1\n"
    module = load(library(source))
    pattern = site(Slot("scale_*", passing, Contract(parameters=("value",))))
    assert install.install("p", pattern, module, late=False).slots == ("scale_a",)


def test_patches_share_a_slot_in_order_and_leave_one_by_one(library: Callable[..., str]) -> None:
    module = load(library())
    original = module.scale

    def doubling(proceed, *args, **kwargs):
        return proceed(*args, **kwargs) * 2

    first, second = site(), site(Slot("scale", doubling))
    install.install("first", first, module, late=False)
    wrapper = module.scale
    install.install("second", second, module, late=False)
    assert module.scale is wrapper, "one wrapper per slot"
    assert module.scale(1) == 1 * 2 * 2 + 100
    install.uninstall("first", first)
    assert module.scale(1) == 4
    assert module.scale is wrapper
    install.uninstall("second", second)
    assert module.scale is original


def test_a_site_is_installed_whole_or_not_at_all(library: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    class Closed(type):
        def __setattr__(cls, name, value):
            raise TypeError("closed")
    class Model(metaclass=Closed):
        def forward(self, value): return value
    def scale(value, factor=2): return value * factor
    """
    module = load(library(source))
    original = module.scale
    both = site(Slot("scale", adding_hundred), Slot("Model.forward", adding_hundred))
    with pytest.raises(TypeError, match="closed"):
        install.install("p", both, module, late=False)
    assert module.scale is original
    assert not install.is_installed("p", both)
    assert install.install("p", site(), module, late=False).slots == ("scale",), "and it can be tried again"


def test_setting_that_does_not_hold_is_an_error(library: Callable[..., str]) -> None:
    source = """
    class Deaf(type):
        def __setattr__(cls, name, value): pass
    class Model(metaclass=Deaf):
        def forward(self, value): return value
    """
    module = load(library(source))
    with pytest.raises(RuntimeError, match=r"toylib\.core\.Model\.forward kept its old value when it was set"):
        install.install("p", site(Slot("Model.forward", passing)), module, late=False)


def test_someone_elses_patch_on_top_is_seen_and_left(library: Callable[..., str]) -> None:
    module = load(library())
    install.install("p", site(), module, late=False)
    ours = module.scale

    def theirs(value, factor=2):
        return ours(value, factor) + 1

    module.scale = theirs
    assert install.shadowed("p", site()) == install.Shadowed(replaced=("scale",), passing=("scale",))
    assert install.uninstall("p", site()) == ("toylib.core.scale",)
    assert module.scale is theirs
    assert theirs(1) == 3, "our wrapper below theirs does nothing any more"


def through_closure(ours: Callable[..., object], owner: object) -> Callable[..., object]:
    return lambda *args: ours(*args)


def through_wraps(ours: Callable[..., object], owner: object) -> Callable[..., object]:
    return functools.wraps(ours)(lambda *args: None)


def through_global(ours: Callable[..., object], owner: object) -> Callable[..., object]:
    space = {"saved": ours}
    exec("def theirs(*args):\n    def inner(): return saved(*args)\n    return inner()", space)
    return space["theirs"]


def through_attribute(ours: Callable[..., object], owner: object) -> Callable[..., object]:
    owner._saved = ours
    return lambda self, *args: self._saved(*args)


def through_default(ours: Callable[..., object], owner: object) -> Callable[..., object]:
    return lambda *args, ours=ours: ours(*args)


def through_partial(ours: Callable[..., object], owner: object) -> Callable[..., object]:
    return functools.partialmethod(functools.partial(ours)).func


def through_wrapt(ours: Callable[..., object], owner: object) -> Callable[..., object]:
    import wrapt

    return wrapt.FunctionWrapper(ours, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))


@pytest.mark.parametrize(
    "replace",
    [
        through_closure,
        through_wraps,
        through_global,
        through_attribute,
        through_default,
        through_partial,
        through_wrapt,
    ],
)
def test_a_replacement_that_holds_the_wrapper_may_pass_to_it(library: Callable[..., str], replace) -> None:
    module = load(library())
    declared = site(Slot("Model.forward", adding_hundred))
    install.install("p", declared, module, late=False)
    module.Model.forward = replace(module.Model.forward, module.Model)
    assert install.shadowed("p", declared) == install.Shadowed(("Model.forward",), passing=("Model.forward",))


def test_a_replacement_that_holds_something_else_does_not(library: Callable[..., str]) -> None:
    module = load(library())
    declared = site(Slot("Model.forward", adding_hundred))
    install.install("p", declared, module, late=False)
    other = module.Model.double
    module.Model.forward = lambda self, value: other(value)
    assert install.shadowed("p", declared) == install.Shadowed(("Model.forward",))
    del module.Model.forward
    assert install.shadowed("p", declared) == install.Shadowed(("Model.forward",)), "nothing is there any more"


def test_a_class_that_someone_replaced_is_looked_through(library: Callable[..., str]) -> None:
    module = load(library())
    declared = site(Slot("Model.forward", adding_hundred))
    install.install("p", declared, module, late=False)
    module.Model = type("Theirs", (module.Model,), {})
    assert install.shadowed("p", declared) == install.Shadowed(), "it inherits the wrapper"
    module.Model = type("Theirs", (module.Model,), {"forward": lambda self, value: value})
    assert install.shadowed("p", declared) == install.Shadowed(("Model.forward",))


RUN_ANEW = {"reloaded": importlib.reload, "imported anew": lambda module: sys.modules.pop("toylib.core") and load()}
BOTH = site(Slot("scale", adding_hundred), Slot("Model.__init__", passing), mappings=("TABLE",))


@pytest.mark.parametrize("how", RUN_ANEW)
def test_a_module_that_ran_anew_is_seen_and_can_be_wrapped_again(library: Callable[..., str], how: str) -> None:
    module = load(library())
    install.install("p", BOTH, module, late=False)
    install.install("q", BOTH, module, late=False, order=1)
    of_before = module.scale
    module = RUN_ANEW[how](module)
    assert module.scale(1) == 2
    assert install.shadowed("p", BOTH) == install.Shadowed(anew=("scale", "Model.__init__"))
    for patch in ("p", "q"):
        assert not install.is_installed(patch, BOTH)
        install.install(patch, BOTH, module, late=True, order="pq".index(patch))
        assert install.is_installed(patch, BOTH)
        assert install.shadowed(patch, BOTH) == install.Shadowed()
    assert module.scale(1) == module.TABLE["a"](1) == of_before(1) == 202
    for patch in ("p", "q"):
        assert install.uninstall(patch, BOTH) == ()
    assert module.scale(1) == module.TABLE["a"](1) == of_before(1) == 2, "also what took the wrapper of before by name"
    assert "__init__" not in vars(module.Model)


def test_what_someone_replaced_after_a_reload_is_left_when_the_rest_is_wrapped_again(
    library: Callable[..., str],
) -> None:
    module = load(library())
    both = site(Slot("scale", adding_hundred), Slot("scale_more", adding_hundred))
    install.install("p", both, module, late=False)
    importlib.reload(module)
    module.scale_more = theirs = lambda value, factor=3: -1
    assert install.shadowed("p", both) == install.Shadowed(("scale_more",), anew=("scale",))
    assert install.install("p", both, module, late=True).slots == ("scale",)
    assert module.scale(1) == 102
    assert module.scale_more is theirs
    assert install.shadowed("p", both) == install.Shadowed(("scale_more",))


def test_the_original_that_someone_put_back_is_wrapped_again(library: Callable[..., str]) -> None:
    module = load(library())
    original = module.scale
    install.install("p", site(), module, late=False)
    wrapper, module.scale = module.scale, original
    assert install.shadowed("p", site()) == install.Shadowed(anew=("scale",))
    install.install("p", site(), module, late=True)
    assert module.scale is wrapper
    assert module.scale(1) == 102, "once, not twice"


def test_an_inherited_method_pickles_under_the_subclass(library: Callable[..., str]) -> None:
    module = load(library())
    install.install("p", site(Slot("Model.__init__", passing, Contract(parameters=("size",)))), module, late=False)
    for held in (vars(module.Model)["__init__"], module.Model(3), [module.Model(3).forward]):
        pickle.loads(pickle.dumps(held))
    wrapped = {name: value for name, value in vars(module.Model).items() if not isinstance(value, property)}
    assert pickle.loads(pickle.dumps(wrapped["__init__"])) is module.Model.__init__


def test_a_callable_that_cannot_be_hashed_is_a_target_as_any_other(library: Callable[..., str]) -> None:
    source = """
    class Odd:
        def __eq__(self, other): return isinstance(other, Odd)
        def __call__(self, value, factor=2): return value * factor
    scale = Odd()
    TABLE = {"a": scale}
    """
    module = load(library(source))
    original = module.scale
    with pytest.raises(TypeError, match="unhashable"):
        hash(original)
    odd = site(mappings=("TABLE",))
    install.install("p", odd, module, late=True)
    assert module.scale(3) == module.TABLE["a"](3) == 106
    assert install.shadowed("p", odd) == install.Shadowed()
    importlib.reload(module)
    assert install.shadowed("p", odd) != install.Shadowed()
    install.uninstall("p", odd)


def test_a_handler_that_breaks_before_going_on_is_left_out(library: Callable[..., str]) -> None:
    module = load(library())

    def broken(proceed, *args, **kwargs):
        raise KeyError("a fault of the patch")

    install.install("p", site(Slot("scale", broken)), module, late=False)
    assert module.scale(3, factor=5) == 15
    (note,) = ledger.fallbacks("p")
    assert "the patch itself failed in toylib.core.scale" in note.text
    assert "a fault of the patch" in note.text


def test_a_handler_that_breaks_is_an_error_under_strict(library: Callable[..., str]) -> None:
    module = load(library())
    ledger.reset(strict=True, first_use=lambda: "")

    def broken(proceed, *args, **kwargs):
        raise KeyError("a fault of the patch")

    install.install("p", site(Slot("scale", broken)), module, late=False)
    with pytest.raises(StrictError, match="the patch itself failed"):
        module.scale(3)


def test_upstreams_own_error_and_ours_reach_the_caller(library: Callable[..., str]) -> None:
    module = load(library())
    calls = []

    def counting(proceed, *args, **kwargs):
        calls.append(args)
        return proceed(*args, **kwargs)

    install.install("p", site(Slot("scale", counting)), module, late=False)
    with pytest.raises(TypeError):
        module.scale(None)
    assert len(calls) == 1, "a call that upstream refused is not run twice"
    assert ledger.fallbacks("p") == ()

    def refusing(proceed, *args, **kwargs):
        raise FlagConflictError("asked for two things")

    install.install("q", site(Slot("scale", refusing)), module, late=False)
    with pytest.raises(FlagConflictError):
        module.scale(1)


COUNTING = """
calls = []
def scale(value):
    calls.append(value)
    if isinstance(value, BaseException):
        raise value
    return value
"""


@pytest.fixture
def counting(library: Callable[..., str]) -> Callable[..., ModuleType]:
    """Installs a handler on a `scale` that keeps its calls, returns its argument, and raises it where it is an
    error."""

    def install_on(handler: Callable[..., object], strict: bool = False) -> ModuleType:
        ledger.reset(strict=strict, first_use=lambda: "")
        module = load(library(COUNTING))
        install.install("p", site(Slot("scale", handler)), module, late=False)
        return module

    return install_on


def broken_after(proceed, *args, **kwargs):
    try:
        proceed(*args, **kwargs)
    finally:
        raise KeyError("a fault of the patch")


def test_a_handler_that_breaks_after_upstream_returned_leaves_upstreams_result(
    counting: Callable[..., ModuleType],
) -> None:
    module = counting(broken_after)
    assert module.scale(1) == 1
    assert module.calls == [1], "upstream's code does not run twice"
    (note,) = ledger.fallbacks("p")
    assert (
        "the patch itself failed in toylib.core.scale; upstream's code had run, and the caller gets its result"
        in note.text
    )
    assert "a fault of the patch" in note.text


def test_a_handler_that_breaks_after_upstream_returned_is_an_error_under_strict(
    counting: Callable[..., ModuleType],
) -> None:
    module = counting(broken_after, strict=True)
    with pytest.raises(StrictError, match="a fault of the patch"):
        module.scale(1)
    assert module.calls == [1]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_upstreams_error_is_not_hidden_by_a_fault_of_the_patch(
    counting: Callable[..., ModuleType], kind: type[BaseException], strict: bool
) -> None:
    module, error = counting(broken_after, strict), kind("upstream's")
    with pytest.raises(kind) as raised:
        module.scale(error)
    assert raised.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert raised.traceback[-1].name == "scale"
    assert module.calls == [error]
    (note,) = ledger.fallbacks("p")
    assert "the caller gets its error" in note.text


def test_an_error_that_a_handler_raises_from_upstreams_passes(counting: Callable[..., ModuleType]) -> None:
    def explaining(proceed, *args, **kwargs):
        try:
            return proceed(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"more words ({error})") from error

    with pytest.raises(ValueError, match="more words"):
        counting(explaining).scale(ValueError("upstream's"))
    assert ledger.fallbacks("p") == ()


def test_the_last_of_several_calls_of_upstream_is_what_a_fault_leaves(counting: Callable[..., ModuleType]) -> None:
    def trying_again(proceed, first, second):
        with contextlib.suppress(ValueError):
            proceed(first)
        with contextlib.suppress(ValueError):
            proceed(second)
        raise KeyError("a fault of the patch")

    module, error = counting(trying_again), ValueError("upstream's")
    assert module.scale(error, 2) == 2
    with pytest.raises(ValueError, match="upstream's"):
        module.scale(1, error)
    assert module.calls == [error, 2, 1, error]


def test_an_interrupt_passes_through_a_handler(counting: Callable[..., ModuleType]) -> None:
    def interrupted(proceed, *args, **kwargs):
        proceed(*args, **kwargs)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        counting(interrupted).scale(1)
    assert ledger.fallbacks("p") == ()


@pytest.mark.parametrize("handler", [passing, broken_after])
def test_an_error_that_was_dropped_keeps_nothing_alive(
    library: Callable[..., str], handler: Callable[..., object]
) -> None:
    class Large:
        pass

    module = load(library("def scale(value): raise ValueError\n"))
    install.install("p", site(Slot("scale", handler)), module, late=False)
    gc.disable()
    try:
        large = Large()
        alive = weakref.ref(large)
        with contextlib.suppress(ValueError):
            module.scale(large)
        del large
        assert alive() is None, "a retry after running out of memory counts on this"
    finally:
        gc.enable()


def test_a_fault_that_cannot_be_printed_is_recorded_too(counting: Callable[..., ModuleType]) -> None:
    class UnprintableError(Exception):
        def __getattribute__(self, name: str) -> object:
            raise RuntimeError("no attribute for you")

    def broken(proceed, *args, **kwargs):
        with contextlib.suppress(ValueError):
            proceed(*args, **kwargs)
        raise UnprintableError

    module = counting(broken)

    def outcome(value: object) -> object:
        try:
            return module.scale(value)
        except Exception as error:  # pytest could not print it either
            return type(error).__name__

    assert (outcome(1), outcome(ValueError("upstream's"))) == (1, "ValueError")
    assert all("UnprintableError, which cannot be printed" in note.text for note in ledger.fallbacks("p"))


def test_a_fault_with_another_text_at_each_call_is_one_warning(
    counting: Callable[..., ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(proceed, value):
        raise KeyError(value)

    module = counting(broken)
    for number in range(50):
        assert module.scale(number) == number
    assert len(caplog.records) == 1


def test_late_names_in_other_modules_are_rebound_and_named(library: Callable[..., str]) -> None:
    module = load(library())
    consumer = ModuleType("consumer")
    consumer.scaled = module.scale
    sys.modules["consumer"] = consumer
    original = module.scale
    applied = install.install("p", site(), module, late=True)
    assert applied.rebound == ("consumer.scaled",)
    assert consumer.scaled(1) == 102
    install.uninstall("p", site())
    assert consumer.scaled is original


def test_a_module_that_took_the_wrapper_by_name_is_reached_again_after_undo(library: Callable[..., str]) -> None:
    module = load(library())
    original = module.scale
    install.install("p", site(), module, late=False)
    taken_in_time = module.scale
    install.uninstall("p", site())
    assert (module.scale, taken_in_time(1)) == (original, 2)
    install.install("p", site(), module, late=True)
    assert taken_in_time(1) == module.scale(1) == 102
    install.uninstall("p", site())
    assert (module.scale, taken_in_time(1)) == (original, 2)


def test_an_inherited_method_that_changed_since_is_wrapped_anew(library: Callable[..., str]) -> None:
    module = load(library())
    inherited = site(Slot("Model.__init__", passing, Contract(parameters=("size",))))
    install.install("p", inherited, module, late=False)
    install.uninstall("p", inherited)
    module.Base.__init__ = lambda self, size: setattr(self, "size", size * 2)
    install.install("p", inherited, module, late=False)
    assert module.Model(3).size == 6


def test_late_names_are_left_and_named_where_the_site_forbids_rebinding(library: Callable[..., str]) -> None:
    module = load(library())
    consumer = ModuleType("consumer")
    consumer.scaled = module.scale
    sys.modules["consumer"] = consumer
    applied = install.install("p", site(rebind_holders=False), module, late=True)
    assert (applied.rebound, applied.left) == ((), ("consumer.scaled",))
    assert consumer.scaled(1) == 2


def test_strict_makes_the_first_use_raise(library: Callable[..., str]) -> None:
    module = load(library())
    install.raise_when_used("p", site(), module, StrictError("p: DRIFTED"))
    with pytest.raises(StrictError, match="DRIFTED"):
        module.scale(1)
    install.uninstall("p", site())
    assert module.scale(1) == 2


def test_threads_that_install_and_call_at_once(library: Callable[..., str]) -> None:
    module = load(library())
    original = module.scale
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            barrier.wait()
            for _ in range(50):
                install.install(f"p{number}", site(), module, late=False)
                value = module.scale(0)
                assert value % 100 == 0
                assert 100 <= value <= 800
                install.uninstall(f"p{number}", site())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert module.scale is original


def test_a_fork_while_another_thread_holds_the_lock_does_not_deadlock(library: Callable[..., str]) -> None:
    module = load(library())
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            install.install("p", site(), module, late=False)
            install.uninstall("p", site())

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(10)  # a deadlocked child dies by SIGALRM
                install.install("child", site(), module, late=False)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
