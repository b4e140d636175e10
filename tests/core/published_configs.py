"""`published_configs.json`: the `config.json` of published checkpoints, all fields that say something of the text part,
as their authors wrote them: also those that are left over from training, from other programs and from older versions
of transformers. Parts for images and sound are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: name → (billions of the text part's weights, fields)
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    name: (each["billions"], each["config"])
    for name, each in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")).items()
}
