"""The header in which a request names its tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from starlette.datastructures import Headers

from ..access.addresses import Networks
from ..access.keys import TENANT
from ..errors import ApiError, clipped

FAIRNESS_HEADER = "x-llm-d-inference-fairness-id"
"""Header in which llm-d's gateways name the flow of a request."""

WITHIN = "|"
"""Separator between a key's tenant and the name that a gateway gives within it; no tenant's name contains it."""


class TenantHeader(NamedTuple):
    """Header that may name the tenant."""

    name: str
    gateways: Networks | None = None
    """The only peers that may send it. In a request with a key it names a part of the key's tenant, so no client can
    pose as another key's tenant. None: any client may name any tenant.
    """

    @classmethod
    def of(cls, name: str | None, gateways: Sequence[str] | None) -> TenantHeader | None:
        """The header that the settings allow; None without one. Gateways default to llm-d's header."""
        if gateways is None:
            return None if name is None else cls(name)
        return cls(name or FAIRNESS_HEADER, Networks(gateways))

    def tenant(self, headers: Headers, peer: str, key_tenant: str) -> str:
        """Return the tenant that a request's header names, or "" if it names none or may not. peer: sent the
        request.
        """
        if self.gateways is not None and peer not in self.gateways:
            return ""
        named = headers.get(self.name, "")
        if named and not TENANT.fullmatch(named):
            raise ApiError(
                400,
                f"the header {self.name} is {clipped(named)!r}; a tenant's name has up to 128 letters, digits "
                "and ._:/+=@-",
                code="invalid_tenant",
            )
        return f"{key_tenant}{WITHIN}{named}" if named and key_tenant and self.gateways is not None else named
