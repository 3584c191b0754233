"""How a family of models writes tool calls, told from its chat template."""

from __future__ import annotations

import enum
import re


class ToolForm(enum.Enum):
    """The markup of a call, and who renders tools into the prompt."""

    HERMES = "hermes"  # <tool_call> around {"name", "arguments"}; by the template
    LLAMA = "llama"  # a message that is {"name", "parameters"}; by the template
    GENERIC = "generic"  # the markup of HERMES; by `tool_prompt.py`, for all other templates

    @property
    def is_tagged(self) -> bool:
        """Whether calls stand between tags, so that text may stand beside them."""
        return self is not ToolForm.LLAMA

    @property
    def arguments_key(self) -> str:
        """What the call's JSON names its arguments."""
        return "parameters" if self is ToolForm.LLAMA else "arguments"


OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


def tool_form_of(template: str) -> ToolForm:
    """The form that a chat template (Jinja source) teaches its model."""
    if not re.search(r"\btools\b", template):
        return ToolForm.GENERIC
    if OPEN_TAG in template:
        # Some write calls as XML inside the same tags, which nothing here reads.
        return ToolForm.GENERIC if "<function=" in template else ToolForm.HERMES
    if "<|start_header_id|>" in template and "parameters" in template:
        return ToolForm.LLAMA
    return ToolForm.GENERIC
