"""What frozen towers add to the core, see `mm_utils.doors`."""

TERMS = {"distillation": "mm_utils.extras.frozen.distillation.Distillation"}
CALLBACKS = {
    "cache_features": "mm_utils.extras.frozen.callbacks.CacheFeatures",
    "teacher": "mm_utils.extras.frozen.callbacks.CacheTeacher",
}
