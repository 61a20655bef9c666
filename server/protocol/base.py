"""What all request models share: strict types, unknown fields ignored, null means "not given".

Must not know: any field.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """Base of all. Strict: no string is taken for a number. Unknown fields are ignored: OpenAI adds some often."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())
