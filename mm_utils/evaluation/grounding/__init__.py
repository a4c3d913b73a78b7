"""Where phrases are: pointing into images, spans of clips and sounds."""
