"""Finding providers: those of this folder, any class of the user's, and those of other environments."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import cast

from conformance.isolation import DEFAULT_LIMITS, Limits
from conformance.providers import remote
from conformance.providers.protocol import Provider, UnavailableError

# The order in which reports name them.
_ORDER = ("reference", "composite", "torchvision", "mmcv")


@dataclass(frozen=True)
class Loaded:
    """A provider that was tried: its version, or why it is not available."""

    provider: Provider
    version: str = ""
    unavailable: str = ""
    # Whether every question is put to it in a process of its own.
    isolated: bool = False

    @property
    def name(self) -> str:
        """The provider's name."""
        return self.provider.name

    @property
    def implementation(self) -> str:
        """What the ledger knows it as: several providers may be versions of one implementation."""
        return str(getattr(self.provider, "implementation", self.name))


def built_in() -> list[Provider]:
    """The providers of this folder, one per file."""
    import conformance.providers as package

    modules = [
        importlib.import_module(f"conformance.providers.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    providers: list[Provider] = [module.PROVIDER for module in modules if hasattr(module, "PROVIDER")]
    return sorted(
        providers,
        key=lambda provider: (
            _ORDER.index(provider.name) if provider.name in _ORDER else len(_ORDER),
            provider.name,
        ),
    )


def from_spec(spec: str, limits: Limits = DEFAULT_LIMITS) -> Provider:
    """The provider ``module:attribute``, an instance or a class without arguments, or one of another environment.

    Raises ValueError when it can't be imported or lacks a name or `load`.
    """
    if "=" in spec:
        return remote.from_option(spec, limits)
    module_name, separator, attribute = spec.partition(":")
    if not separator:
        raise ValueError(
            f"--provider: got {spec!r}, expected MODULE:ATTRIBUTE or NAME=python:EXECUTABLE[,kind=KIND]"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--provider: {spec!r} can't be imported: {error}") from error
    try:
        provider = found() if isinstance(found, type) else found
    except Exception as error:
        raise ValueError(f"--provider: {spec!r} can't be made: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(provider, "name", None), str) or not callable(getattr(provider, "load", None)):
        raise ValueError(f"--provider: {spec!r} has no `name` or no `load()`")
    return cast(Provider, provider)


def load(provider: Provider, *, isolated: bool = False) -> Loaded:
    """Makes a provider ready; one that can't be used here comes back with the reason."""
    try:
        return Loaded(provider, version=str(provider.load()), isolated=isolated)
    except (UnavailableError, ImportError) as error:
        return Loaded(provider, unavailable=str(error))
    except Exception as error:
        return Loaded(provider, unavailable=f"its load() raised {type(error).__name__}: {error}")
