"""What soft targets add to the core, see `mm_utils.doors`."""

_HERE = "mm_utils.extras.soft_targets.terms"
TERMS = {"self_distillation": f"{_HERE}.SelfDistillation", "distillation": f"{_HERE}.Distillation"}
