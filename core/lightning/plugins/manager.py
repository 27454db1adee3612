"""`Plugins`: all plugins of a process, found, checked and loaded when they are first needed."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pluggy

from lightning import hooks
from lightning.errors import PluginError
from lightning.installation import OWN, install_command
from lightning.plugins.attached_adapters import Adapters, Installation
from lightning.plugins.discovery import ANY, DISABLE, GROUP, PluginInfo, RegisteredNames, discover, extra_of, near, one
from lightning.plugins.importing import imported, on_import
from lightning.types import Caller, StepState, ToolEvent, as_texts

if TYPE_CHECKING:
    from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
    from lightning.config import Config
    from lightning.credit import Credit
    from lightning.demos import Demo
    from lightning.engines.protocol import Engine
    from lightning.gateway.policy import Fleet
    from lightning.policy_server.policies import PolicySet
    from lightning.runner.protocol import Agent, Runner
    from lightning.store.operation import Operation, OperationGroup
    from lightning.store.protocol import Store

ALONE = ("lightning_install", "lightning_identify")
"""Hooks that are called plugin by plugin, so that a wrapper around them would never run."""


OF_TRAINER = (
    "register_orders",
    "register_run_stages",
    "register_samplers",
    "register_step_stages",
    "register_trackers",
    "rollout_finished",
    "step_finished",
)
"""The hooks that an object of a script may have (`Plugins.register`): those that only the trainer's process calls."""


def check(manager: pluggy.PluginManager, plugin: Any) -> None:
    """Raise `PluginError` for the first thing in a plugin that cannot work."""
    specs = hook_names(manager)
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is None:
            if name in specs and _is_its_own(plugin, name) and manager.parse_hookspec_opts(plugin, name) is None:
                raise PluginError(f"its function {name} is not marked as a hook: put @lightning.hookimpl above it")
            continue
        spec = options.get("specname") or name
        if spec in specs:
            _check_arguments(manager, spec, getattr(plugin, name))
        elif not options["optionalhook"]:
            raise PluginError(
                f"it implements {spec!r}, which is no hook{near(spec, specs)} If a plugin that may be absent brings it, write "
                "@lightning.hookimpl(optionalhook=True)"
            )
        if spec in ALONE and (options["wrapper"] or options["hookwrapper"]):
            raise PluginError(f"its {spec} is a wrapper; this hook takes plain functions only")


def hook_names(manager: pluggy.PluginManager) -> list[str]:
    """Every hook that `lightning.hooks` or a plugin specifies."""
    return sorted(name for name, caller in vars(manager.hook).items() if caller.has_spec())


def _check_arguments(manager: pluggy.PluginManager, spec: str, function: Callable[..., object]) -> None:
    wanted = getattr(manager.hook, spec).spec.argnames
    given = inspect.signature(function).parameters.values()
    extra = [item.name for item in given if item.name not in wanted and item.default is item.empty]
    if extra:
        raise PluginError(f"its {spec} takes {', '.join(extra)!r}; the hook is {spec}({', '.join(wanted)})")


def _source_digest(kind: object) -> str:
    """Return the beginning of the SHA-256 (hex) of the source of a class or module; "" if there is no source."""
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:12]  # type: ignore[arg-type]
    except (OSError, TypeError):  # typed in
        return ""


def _is_its_own(plugin: object, name: str) -> bool:
    function = getattr(plugin, name)
    return inspect.isfunction(function) and function.__module__ == getattr(plugin, "__name__", type(plugin).__module__)


logger = logging.getLogger(__name__)

SOLE: Mapping[str, str] = {
    "servers": "lets clients in",
    "fleets": "knows of gateways elsewhere",
    "ports": "guards ports",
    "sessions": "opens training loops of your own",
    "server_sets": "knows several policy servers of one policy",
    "policy_sets": "trains several policies",
}
"""Kinds of which at most one plugin registers one, with what that plugin does."""


class _Isolating(pluggy.PluginManager):
    """Calls each plugin by itself. An exception of one is logged, and the others are still called."""

    def _hookexec(
        self, hook_name: str, methods: Sequence[pluggy.HookImpl], kwargs: Mapping[str, object], firstresult: bool
    ) -> object | list[object]:
        results: list[object] = []
        for method in reversed(methods):
            try:
                result = super()._hookexec(hook_name, [method], kwargs, True)
            except Exception:
                logger.exception("the plugin %r failed in %s", method.plugin_name, hook_name)
                continue
            if result is not None:
                results.append(result)
        if firstresult:
            return results[0] if results else None
        return results


class Plugins:
    """All plugins of this process. They are looked for at the first question. Safe to use from several threads.

    `relay` has the hooks of the loaded plugins; it is complete as long as no module of `awaited` has been imported. `awaited`
    are the modules whose import lets further plugins be loaded. It is None before plugins have been looked for, and while any
    thread loads some: `hook` waits for that.
    """

    def __init__(self) -> None:
        self._manager = _Isolating(GROUP)
        self._manager.add_hookspecs(hooks)
        self.relay = self._manager.hook
        self.awaited: frozenset[str] | None = None
        self._lock = threading.RLock()
        self._found = self._loaded = False
        self._loading = 0
        self._entries: dict[str, EntryPoint] = {}
        self._infos: dict[str, PluginInfo] = {}
        self._names = RegisteredNames()
        self._asked: set[tuple[str, str]] = set()
        self._adapters = Adapters(self._manager, self._infos)
        self._arrivals: deque[str] = deque()

    # what was registered ----------------------------------------------------------------------------------------
    @property
    def hook(self) -> pluggy.HookRelay:
        """Call every loaded plugin: `plugins().hook.step_finished(record=...)`. A plugin that raises is logged."""
        self._load()
        return self._manager.hook

    def get(self, kind: str, name: str) -> object:
        """What was registered under a name. Raises `PluginError` for an unknown name and for one claimed twice."""
        self._register_all(kind)
        if claimants := self._names.contested.get((kind, name)):
            both = " and ".join(str(self._infos[plugin]) for plugin in sorted(claimants))
            raise PluginError(
                f"two plugins register the {one(kind)} {name!r}: {both}. Uninstall one of them, or set {DISABLE} to it."
            )
        if name not in self._names.taken[kind]:
            raise PluginError(self._no_such(kind, name))
        return self._names.taken[kind][name].factory

    def names(self, kind: str) -> list[str]:
        """Every registered name of a kind, sorted."""
        self._register_all(kind)
        return sorted(self._names.taken[kind])

    def usual(self, kind: str) -> list[str]:
        """Return the names of a kind that are used where a user names none."""
        self._register_all(kind)
        return sorted(name for name, each in self._names.taken[kind].items() if each.usual)

    def algorithm(self, name: str) -> Callable[..., Algorithm | SearchAlgorithm]:
        """The factory of an algorithm."""
        return cast("Callable[..., Algorithm | SearchAlgorithm]", self.get("algorithms", name))

    def credit(self, credit: str | Credit) -> Credit:
        """A credit assignment function: the registered one of a name, or the function that is given."""
        return cast("Credit", self.get("credits", credit)) if isinstance(credit, str) else credit

    def engine(self, name: str) -> Callable[[Config], Engine]:
        """The factory of an engine, which trains all policies of a run."""
        make = cast("Callable[[Config], Engine]", self.get("engines", name))

        def made(config: Config) -> Engine:
            several = self.policy_set(config)
            return make(config) if several is None else several.engine(make, config)

        return made

    def policy_set(self, config: Config) -> PolicySet | None:
        """The policies of a run with these settings; None if it has one."""
        if not self.names("policy_sets"):
            return None
        return cast("Callable[[Config], PolicySet | None]", self.sole("policy_sets", "several policies"))(config)

    def runner(self, name: str) -> Callable[[Agent, Config], Runner]:
        """The factory of a runner."""
        return cast("Callable[[Agent, Config], Runner]", self.get("runners", name))

    def sole(self, kind: str, wanted: str) -> object:
        """Return what the one plugin of a kind of `SOLE` registered. Raises `PluginError`, which names `wanted` as the reason,
        if no plugin or more than one does."""
        known = self.names(kind)
        if len(known) > 1:
            both = " and ".join(str(self.owner(kind, name)) for name in known)
            raise PluginError(
                f"{wanted} needs one {one(kind)}, and there are two: {both}. Set {DISABLE} to one of them."
            )
        if not known:
            raise PluginError(self.missing(kind, wanted))
        return self.get(kind, known[0])

    def missing(self, kind: str, wanted: str) -> str:
        """Return the message that `wanted` needs a plugin of a kind of `SOLE`, and how to get one."""
        return f"{wanted} needs a plugin that {SOLE[kind]}, and there is none.{self.cures(kind)}"

    def fleet(self, wanted: str) -> Callable[[], Fleet]:
        """The factory of the object that knows of gateways elsewhere. Raises `PluginError`, as `sole` does."""
        return cast("Callable[[], Fleet]", self.sole("fleets", wanted))

    def demo(self, name: str) -> Callable[[], Demo]:
        """The factory of a demonstration."""
        return cast("Callable[[], Demo]", self.get("demos", name))

    def operations(self) -> tuple[Operation, ...]:
        """Return the operations that plugins add to every store. Raises `PluginError` for one that two plugins, or the store,
        have."""
        from lightning.store.protocol import Store

        brought: list[Operation] = []
        owners: dict[str, PluginInfo] = {}
        for name in self.names("operations"):
            group = cast("Callable[[], OperationGroup]", self.get("operations", name))()
            owner = self.owner("operations", name)
            if group.name != name:
                raise PluginError(f"the plugin {owner} registers the group of operations {group.name!r} as {name!r}")
            for operation in group.operations:
                other = owners.get(operation.name)
                if other is not None or hasattr(Store, operation.name):
                    first = "the store" if other is None else f"the plugin {other}"
                    culprit = "the plugin" if other is None else "one of them"
                    raise PluginError(
                        f"{first} and the plugin {owner} both have the operation {operation.name!r}. Uninstall {culprit}, or "
                        f"set {DISABLE} to it."
                    )
                owners[operation.name] = owner
                brought.append(operation)
        return tuple(brought)

    def owner(self, kind: str, name: str) -> PluginInfo:
        """The plugin that registers a name."""
        self._register_all(kind)
        return self._infos[self._names.taken[kind][name].plugin]

    def store(self, url: str) -> Store:
        """A store, not yet opened, for a URL such as `sqlite:///runs/a/lightning.db`; its scheme names the factory."""
        return cast("Callable[[str], Store]", self.by_scheme("stores", url))(url)

    @asynccontextmanager
    async def opened_store(self, url: str, *, make: bool = True) -> AsyncIterator[Store]:
        """Open the store at a URL for the block. `Store.open` says what it raises and what `make` does."""
        store = self.store(url)
        await store.open(make=make)
        try:
            yield store
        finally:
            await store.close()

    def by_scheme(self, kind: str, url: str) -> object:
        """Return what was registered under the scheme of a URL. Raises `PluginError`."""
        scheme, separator, _ = url.partition("://")
        if not separator:
            from lightning.store.url import redacted

            begins = ", ".join(f"{name}://" for name in self.names(kind))
            known = begins or f"nothing: no plugin registers a {one(kind)}.{self.cures(kind)}"
            raise PluginError(f"{redacted(url)!r} is not a {one(kind)}'s URL: it begins with {known}")
        return self.get(kind, scheme.lower())

    # the plugins themselves -------------------------------------------------------------------------------------
    def plugins(self) -> list[PluginInfo]:
        """Return every installed plugin, in any state, sorted by name."""
        self._load()
        for hook in hook_names(self._manager):
            if hook.startswith("register_"):
                self._register_all(hook.removeprefix("register_"))
        return sorted(self._infos.values(), key=lambda info: info.name)

    def left_out(self, kind: str = "") -> str:
        """Say which plugins are broken, disabled or not loaded yet, because one of them may have the name that is missing:
        sentences, each after a space."""
        missing = [info for info in self.plugins() if info.state in ("broken", "disabled", "waiting")]
        text = "".join(
            f" The plugin {info}, which might have it, is broken: {info.error}."
            for info in missing
            if info.state == "broken"
        )
        disabled = [info for info in missing if info.state == "disabled"]
        if len(disabled) == 1:
            text += f" The plugin {disabled[0]}, which might have it, is disabled: {disabled[0].error}."
        elif disabled:
            names = ", ".join(repr(info.name) for info in disabled)
            text += f" The plugins {names}, which might have it, are disabled: {DISABLE} lists them."
        # what lightning's own plugins bring is known without loading them (`brought`)
        strangers = [info for info in missing if info.state == "waiting" and info.distribution != OWN]
        waiting = ", ".join(f"{info.name!r} ({info.waits_for})" for info in strangers)
        if waiting and kind != "settings":
            text += f" Plugins that are loaded once their framework is imported: {waiting}."
        return text

    def adapters(self) -> list[PluginInfo]:
        """Return the plugins that name agents or report tools, that wait for a framework, or that are broken or disabled."""
        return [
            info
            for info in self.plugins()
            if info.waits_for or info.state in ("broken", "disabled") or set(ALONE) & set(info.hooks)
        ]

    def install_adapters(
        self, emit: Callable[[ToolEvent | StepState], None], names: Sequence[str] | None = None
    ) -> Callable[[], None]:
        """Attach adapters to their frameworks, now or as soon as a framework is imported. Return the function that undoes it.

        `emit` receives each tool run; an exception of `emit` is logged and does not reach the agent. `names` limits the
        adapters (None: all). An adapter that fails is logged and left out. Raises `PluginError` if one of `names` is unknown or
        could not be loaded: training without it would silently be another training.
        """
        names = None if names is None else as_texts(names, "adapters")
        self._load()
        self._require(names or ())
        with self._locked():
            installation = self._adapters.begin(emit, None if names is None else frozenset(names))
            for info in list(self._infos.values()):
                if info.state == "loaded":
                    self._adapters.attach(installation, info.name)
                elif info.state == "waiting" and installation.wants(info.name):
                    stop = on_import(info.waits_for, functools.partial(self._arrived, info.name))
                    installation.undos.append(stop)
        return functools.partial(self._uninstall, installation)

    def identify(self) -> Caller | None:
        """Return who is about to call the model, by the first adapter that knows; None when none does. Never raises."""
        if not self._loaded:  # also while another thread loads them
            self._load()
        return self._adapters.identify()

    def attached(self) -> set[str]:
        """The adapters that are attached to their frameworks now."""
        return self._adapters.attached()

    def _require(self, names: Sequence[str]) -> None:
        for name in names:
            info = self._infos.get(name)
            if info is None:
                known = [item.name for item in self.adapters()]
                raise PluginError(
                    f"there is no adapter {name!r}{near(name, known)} Known: {', '.join(known) or 'none'}."
                )
            if info.state in ("broken", "disabled"):
                raise PluginError(f"the adapter {info} is {info.state}: {info.error}")

    def _uninstall(self, installation: Installation) -> None:
        with self._locked():
            self._adapters.end(installation)

    def register(self, plugin: object) -> PluginInfo:
        """Register an object of a script, whose methods are hooks of `OF_TRAINER`, in this process alone. Its name is that of
        its class, `MODULE:CLASS`, and its version a digest of the class's source. An object of the same name is replaced, as
        when a cell of a notebook runs again.

        Raises `PluginError` for an object without hooks, with a hook that other processes call, or that cannot work.
        """
        kind = plugin if isinstance(plugin, ModuleType) else type(plugin)
        name = kind.__name__ if isinstance(kind, ModuleType) else f"{kind.__module__}:{kind.__qualname__}"
        if isinstance(plugin, type):
            raise PluginError(f"{plugin.__qualname__} is a class: register an object of it, {plugin.__qualname__}()")
        with self._locked():
            check(self._manager, plugin)
            options = {each: self._manager.parse_hookimpl_opts(plugin, each) for each in dir(plugin)}
            found = sorted(str(given.get("specname") or each) for each, given in options.items() if given)
            if elsewhere := [hook for hook in found if hook not in OF_TRAINER]:
                raise PluginError(
                    f"the hook {elsewhere[0]} of {name} is also called in processes that this script does not run in (agents, "
                    "gateways, commands): name the plugin in an entry point of the group `lightning`, as a distribution. From "
                    f"a script there are {', '.join(OF_TRAINER)}"
                )
            if not found:
                raise PluginError(f"{name} has no hook: put @lightning.hookimpl above its methods")
            if self._manager.has_plugin(name):
                self._names.drop(name)
                self._manager.unregister(name=name)
                self._asked = {asked for asked in self._asked if asked[1] != name}
            self._manager.register(plugin, name)
            self._infos[name] = PluginInfo(name, name, "a script", _source_digest(kind), "loaded", hooks=tuple(found))
        return self._infos[name]

    # loading ----------------------------------------------------------------------------------------------------
    def _load(self) -> None:
        """Find plugins once. Load those that wait for no module, or whose module has been imported since."""
        with self._locked():
            if not self._found:
                self._entries, infos = discover()
                self._found = True
                self._infos.update(infos)
            modules = {name: self._infos[name].waits_for for name in self._entries}
            self._load_these(name for name, module in modules.items() if not module or imported(module))
            self._loaded = True

    def _load_these(self, names: Iterable[str]) -> None:
        """Load plugins. This may call itself while a plugin is imported; `awaited` is known again when the outermost call
        ends."""
        self.awaited = None
        self._loading += 1
        try:
            self._import_and_register(names)
        finally:
            self._loading -= 1
        if not self._loading:  # not if loading was interrupted: the next question goes on with it
            self.awaited = frozenset(self._infos[name].waits_for for name in self._entries)

    def _import_and_register(self, names: Iterable[str]) -> None:
        """Import plugins and add the hooks that they specify. Only then check and register the hooks that they implement."""
        made: dict[str, object] = {}
        for name in names:
            entry = self._entries.pop(name, None)  # first of all: an import may call this again
            if entry is None:
                continue
            try:
                made[name] = plugin = entry.load()
                if any(self._manager.parse_hookspec_opts(plugin, each) is not None for each in dir(plugin)):
                    self._manager.add_hookspecs(plugin)
            except (Exception, SystemExit) as error:  # noqa: BLE001 — whatever it is, the others must still load
                made.pop(name, None)
                self._break(name, error)
        for name, plugin in made.items():
            self._register(name, plugin)

    def _register(self, name: str, plugin: object) -> None:
        try:
            check(self._manager, plugin)
            self._manager.register(plugin, name)
            implemented = sorted(caller.name for caller in self._manager.get_hookcallers(plugin) or ())
        except (Exception, SystemExit) as error:  # noqa: BLE001 — as above
            self._break(name, error)
        else:
            self._infos[name] = replace(self._infos[name], state="loaded", hooks=tuple(implemented))
            self._adapters.attach_everywhere(name)

    def _break(self, name: str, error: BaseException) -> None:
        """Mark a plugin as broken and remove everything that it has registered."""
        self._names.drop(name)
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)
            self._adapters.find_identifiers()
        message = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        self._infos[name] = self._infos[name].broken(message)

    def _register_all(self, kind: str) -> None:
        """Let each plugin register its names of a kind, once, when the kind is first asked for: a plugin may import much for
        it."""
        self._load()
        with self._locked():
            caller: pluggy.HookCaller | None = getattr(self._manager.hook, f"register_{kind}", None)
            if caller is None or not caller.has_spec():
                raise PluginError(f"no plugin that is loaded brings the hook register_{kind}")
            for implementation in list(caller.get_hookimpls()):
                name = implementation.plugin_name
                if (kind, name) in self._asked:
                    continue
                self._asked.add((kind, name))
                register = functools.partial(self._names.take, kind, name)
                try:
                    implementation.function(*[register for _ in implementation.argnames])
                except (Exception, SystemExit) as error:  # noqa: BLE001 — as above
                    self._break(name, error)

    def _no_such(self, kind: str, name: str) -> str:
        known = sorted(self._names.taken[kind])
        hint = "." if self.brought(kind, name) else f"{near(name, known)} Known: {', '.join(known) or 'none'}."
        return f"there is no {one(kind)} {name!r}{hint}{self.cures(kind, name)}"

    def cures(self, kind: str, name: str = ANY) -> str:
        """Say how to get a name that is missing: the extra that brings it, and plugins that were left out."""
        return self.brought(kind, name) + self.left_out(kind)

    def brought(self, kind: str, name: str) -> str:
        """Say which extra brings a name, after a space; "" if that is not known."""
        extra = extra_of(kind, name)
        return f" The plugin {extra!r} brings it. Run: {install_command(extra)}" if extra else ""

    def _arrived(self, name: str, _module: ModuleType) -> None:
        """Load the plugin of a framework that was just imported. Its importer never waits here: the lock's holder may wait for
        it."""
        self._arrivals.append(name)
        self._load_arrivals()

    def _load_arrivals(self) -> None:
        while self._arrivals and self._lock.acquire(blocking=False):
            try:
                while self._arrivals:
                    self._load_these([self._arrivals.popleft()])
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            yield
        self._load_arrivals()


@functools.cache
def plugins() -> Plugins:
    """The plugins of this process."""
    return Plugins()
