"""What adapters add to the core, see `mm_utils.doors`."""

ADAPTERS = {"lora": "mm_utils.extras.lora.adapters.add_adapters"}
"""What adds adapters to a model that is built; `mm_utils.model.adapt` merges, saves and loads them."""
