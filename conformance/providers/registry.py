"""Finding providers: those of this folder, and any class of the user's by ``module:attribute``."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import cast

from conformance.providers.protocol import Provider, UnavailableError

# The order in which reports name them.
_ORDER = ("reference", "composite", "torchvision", "mmcv")


@dataclass(frozen=True)
class Loaded:
    """A provider that was tried: its version, or why it is not available."""

    provider: Provider
    version: str = ""
    unavailable: str = ""

    @property
    def name(self) -> str:
        """The provider's name."""
        return self.provider.name


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


def from_spec(spec: str) -> Provider:
    """The provider ``module:attribute``, an instance or a class without arguments.

    Raises ValueError when it can't be imported or lacks a name or `load`.
    """
    module_name, separator, attribute = spec.partition(":")
    if not separator:
        raise ValueError(f"--provider: got {spec!r}, expected MODULE:ATTRIBUTE")
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


def load(provider: Provider) -> Loaded:
    """Makes a provider ready; one that can't be used here comes back with the reason."""
    try:
        return Loaded(provider, version=str(provider.load()))
    except UnavailableError as error:
        return Loaded(provider, unavailable=str(error))
    except Exception as error:
        return Loaded(provider, unavailable=f"its load() raised {type(error).__name__}: {error}")
