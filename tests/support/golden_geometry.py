"""RankInfo messages as this build writes them and as later ones might: kept as bytes, so that today's code can not
change them along with itself. All but the first and the last say something that changes the meaning of bytes."""

from __future__ import annotations

from base64 import b64decode

_BASE64 = {
    "today": (
        "EggIARABGAEgARqbAQoMCICAgICAAhCEARgBEg8IqICAgIACEBoYAiAaKAAaehJ4CgEAEkEKBGNvbnYQBCIWCgQAAAAAEggAAAAA"
        "AAAAABoEDgAAACoCEAEyBwoBeBgCIAQyBwoBQhgBIAMyBwoBQxgBIAM4ARIwCgVzdGF0ZRAEIhYKBAAAAAASCA4AAAAAAAAAGgQM"
        "AAAAKgIQATIHCgFoGAIgBjgBIhoKCGxvb3BiYWNrEgtjb250ZXh0LTAtMBoBbQ=="
    ),
    "a section of a new kind, required feature": (
        "EggIARABGAEgARqvAQoMCICAgICAAhCEARgBEg8IqICAgIACEBoYAiAaKAAafBJ6CgEAEkMKBGNvbnYQBCIWCgQAAAAAEggAAAAA"
        "AAAAABoEDgAAACoCEAEyCQoBeBgCIAQwBzIHCgFCGAEgAzIHCgFDGAEgAzgBEjAKBXN0YXRlEAQiFgoEAAAAABIIDgAAAAAAAAAa"
        "BAwAAAAqAhABMgcKAWgYAiAGOAEiEHN0cmlkZWRfc2VjdGlvbnMiGgoIbG9vcGJhY2sSC2NvbnRleHQtMC0wGgFt"
    ),
    "a mapper kind of the future": (
        "EggIARABGAEgARqbAQoMCICAgICAAhCEARgBEg8IqICAgIACEBoYAiAaKAAaehJ4CgEAEkEKBGNvbnYQBSIWCgQAAAAAEggAAAAA"
        "AAAAABoEDgAAACoCEAEyBwoBeBgCIAQyBwoBQhgBIAMyBwoBQxgBIAM4ARIwCgVzdGF0ZRAEIhYKBAAAAAASCA4AAAAAAAAAGgQM"
        "AAAAKgIQATIHCgFoGAIgBjgBIhoKCGxvb3BiYWNrEgtjb250ZXh0LTAtMBoBbQ=="
    ),
    "a layer group of a new kind": (
        "EggIARABGAEgARolCgwIgICAgIACEIQBGAESDwiogICAgAIQGhgCIBooABoEGgIIASIaCghsb29wYmFjaxILY29udGV4dC0wLTAaAW0="
    ),
    "memory of a new kind": (
        "EggIARABGAEgARqbAQoMCICAgICAAhCEARhjEg8IqICAgIACEBoYAiAaKAAaehJ4CgEAEkEKBGNvbnYQBCIWCgQAAAAAEggAAAAAAAAA"
        "ABoEDgAAACoCEAEyBwoBeBgCIAQyBwoBQhgBIAMyBwoBQxgBIAM4ARIwCgVzdGF0ZRAEIhYKBAAAAAASCA4AAAAAAAAAGgQMAAAAKgIQ"
        "ATIHCgFoGAIgBjgBIhoKCGxvb3BiYWNrEgtjb250ZXh0LTAtMBoBbQ=="
    ),
    "token sharding of a new kind": (
        "EggIARABGAIgARpmCgwIgICAgIACEJABGAESDwiogICAgAIQIBgCICAoABpFCkMKAQAQBCI2CgFrCgF2EAIiJgoIAAAAAAAAAAAS"
        "EAAAAAAAAAAAEAAAAAAAAAAaCBAAAAAQAAAAKgIQATgBMgQIBBABIhoKCGxvb3BiYWNrEgtjb250ZXh0LTAtMBoBbQ=="
    ),
    "fields that may be ignored": (
        "EggIARABGAEgARqoAQoMCICAgICAAhCEARgBEg8IqICAgIACEBoYAiAaKAAaehJ4CgEAEkEKBGNvbnYQBCIWCgQAAAAAEggAAAAA"
        "AAAAABoEDgAAACoCEAEyBwoBeBgCIAQyBwoBQhgBIAMyBwoBQxgBIAM4ARIwCgVzdGF0ZRAEIhYKBAAAAAASCA4AAAAAAAAAGgQM"
        "AAAAKgIQATIHCgFoGAIgBjgByj4KYWxzbyBsYXRlciIaCghsb29wYmFjaxILY29udGV4dC0wLTAaAW3CPgVsYXRlcg=="
    ),
}

GOLDEN = {name: b64decode(text) for name, text in _BASE64.items()}
