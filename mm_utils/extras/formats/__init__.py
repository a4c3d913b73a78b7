"""Further formats of pairs: annotation files, folders of classes, parallel lists, tables of known sets, captions in photos, addresses of images."""
