"""The provider `mmcv`: an installed mmcv as it is, else a narrow build of its sources."""

from __future__ import annotations

from conformance.providers.mmcv import install, operators


class Mmcv(operators.Mmcv):
    """mmcv 2.x, which is made importable first."""

    def load(self) -> str:
        """Installs, builds and imports what is missing; see `install.load`."""
        install.load()
        return super().load()


PROVIDER = Mmcv()
