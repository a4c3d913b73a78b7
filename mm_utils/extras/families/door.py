"""What models of others add to the core, see `mm_utils.doors`."""

TOWER_CHANGES = {
    "image_size": "mm_utils.extras.families.image_size.resize",
    "text_tower": "mm_utils.extras.families.text_tower.with_text_tower",
}
MODEL_FORMATS = {"open_clip_config.json": "mm_utils.extras.families.open_clip.as_transformers"}
STOCK = {
    "load": "mm_utils.extras.families.stock.load_stock",
    "processor": "mm_utils.extras.families.stock.stock_processor",
}
"""What loads a dual encoder of transformers, and what makes the processor that is saved with one."""

_SOUNDS = "mm_utils.extras.families.sound_inputs"
SOUND_INPUTS = {
    "ASTFeatureExtractor": f"{_SOUNDS}.Ast",
    "WhisperFeatureExtractor": f"{_SOUNDS}.Whisper",
    "Wav2Vec2FeatureExtractor": f"{_SOUNDS}.Raw",
}
"""By its feature extractor, the `LogMel` that computes the input of a sound tower."""
