"""Hub options: what a run may do on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.option import IGNORED, option


@dataclass(frozen=True, kw_only=True, slots=True)
class HubOptions:
    """Hub: names on the Hugging Face hub in place of paths.

    Args:
        download: Download models, adapters, tokenizers and data sets that are named as on the hub (OWNER/NAME, or
            OWNER/NAME@REVISION) and are not in its cache. false uses the cache alone. Tokens for private and gated
            repositories are those of `hf auth login`, or HF_TOKEN.
    """

    download: bool = option(False, IGNORED)
