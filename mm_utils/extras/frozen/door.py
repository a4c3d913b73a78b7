"""What frozen towers add to the core, see `mm_utils.doors`."""

CALLBACKS = {
    "cache_features": "mm_utils.extras.frozen.callbacks.CacheFeatures",
    "teacher": "mm_utils.objectives.distillation.CacheTeacher",
}
TERMS = {"distillation": "mm_utils.objectives.distillation.Distillation"}
