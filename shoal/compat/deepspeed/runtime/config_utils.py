"""``deepspeed.runtime.config_utils``: the base of DeepSpeed's configuration models, for scripts that have their own."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from shoal.engine.log import logger
from shoal.errors import ConfigError


class DeepSpeedConfigModel(BaseModel):
    """A pydantic model whose fields may be old names of others.

    The value of a field with ``json_schema_extra={"deprecated": True, "new_param": "other"}`` is assigned to ``other``,
    converted by ``new_param_fn`` where there is one. Values ``"auto"`` are left out, so that the defaults apply.

    Raises: pydantic.ValidationError: unknown fields, and values of another type. BothNamesError: a field by its old
    and by its new name.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True,
        extra="forbid",
        populate_by_name=True,
        protected_namespaces=(),
        use_enum_values=True,
        validate_assignment=True,
        validate_default=True,
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {name: value for name, value in data.items() if not _is_auto(value) or name == "replace_method"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            about = field.json_schema_extra
            if isinstance(about, dict) and about.get("deprecated") and name in self.model_fields_set:
                self._hand_over(name, about)

    def _hand_over(self, name: str, about: dict[str, Any]) -> None:
        new = str(about.get("new_param", ""))
        logger.warning("%s is deprecated%s. %s", name, f"; write {new}" if new else "", about.get("deprecated_msg", ""))
        if not new or not about.get("set_new_param", True):
            return
        *sections, last = new.split(".")
        home: BaseModel = self
        for section in sections:
            home = getattr(home, section)
        if last in home.model_fields_set:
            raise BothNamesError(f"{name!r} and {new!r} are both given.", do=f"leave {name!r} out: it is the old name.")
        convert = about.get("new_param_fn", lambda value: value)
        setattr(home, last, convert(getattr(self, name)))


class BothNamesError(ConfigError, AssertionError):
    """A key is given by its old and by its new name. Also an AssertionError, since DeepSpeed asserts against it."""

    code = "config-both-names"


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


__all__ = ["DeepSpeedConfigModel"]
