"""Further formats of pairs: annotation files, parallel lists, tables of known sets, captions in photos, addresses of images."""
