"""Captions that photos carry: every field and encoding, their order, cameras' own texts, hostile and damaged metadata."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image, PngImagePlugin

from mm_utils.data.faults import Fault
from mm_utils.data.images import MOST_BYTES
from mm_utils.data.pairs import load_pairs
from mm_utils.data.prepare.checks import CheckArguments, check_caption
from mm_utils.data.rows.source import DataArguments
from mm_utils.extras.formats.photo_captions import PhotoCaption, photo_caption
from scripts import prepare_data
from tests.kit.reading import read, reasons, write

TEXT = "a red door, Café 日本"
LATIN = "a red door"
XMP = """<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description xmlns:dc="http://purl.org/dc/elements/1.1/">
{}</rdf:Description></rdf:RDF></x:xmpmeta><?xpacket end="w"?>"""
ALT = '<dc:{}><rdf:Alt><rdf:li xml:lang="{}">{}</rdf:li><rdf:li xml:lang="{}">{}</rdf:li></rdf:Alt></dc:{}>'


def xmp(text: str, name: str = "description") -> bytes:
    return XMP.format(ALT.format(name, "de", "eine Tür", "x-default", text, name)).encode()


def iptc(text: bytes, number: int = 120) -> bytes:
    """The Photoshop segment of a JPEG with one IPTC field."""
    field = b"\x1c\x02" + bytes([number]) + len(text).to_bytes(2, "big") + text
    field += b"\0" * (len(field) % 2)
    content = b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0" + len(field).to_bytes(4, "big") + field
    return b"\xff\xed" + (len(content) + 2).to_bytes(2, "big") + content


def exif(tags: dict[int, Any] | None = None, comment: bytes | None = None) -> Image.Exif:
    block = Image.Exif()
    block.update(tags or {})
    if comment is not None:
        block.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    return block


def photo(path: Path, segment: bytes = b"", colour: int = 0, **given: Any) -> str:
    """Write a photo with metadata; `segment` is put behind the head of a JPEG."""
    stream = io.BytesIO()
    image = Image.new("RGB", (32, 24), (colour, 90, 10))
    image.paste((20, colour, 200), (4, 4, 9 + colour % 17, 18))
    kind = {".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".tif": "TIFF"}[path.suffix]
    if kind == "PNG" and "xmp" in given:
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", given.pop("xmp").decode())
        given["pnginfo"] = info
    image.save(stream, kind, **given)
    content = stream.getvalue()
    path.write_bytes(content[:2] + segment + content[2:])
    return str(path)


FIELDS = {
    "XMP description": ({"xmp": xmp(TEXT)}, TEXT, "caption_from_xmp"),
    "XMP title": ({"xmp": xmp(TEXT, "title")}, TEXT, "caption_from_xmp"),
    "IPTC caption": ({"segment": iptc(TEXT.encode())}, TEXT, "caption_from_iptc"),
    "IPTC name": ({"segment": iptc(TEXT.encode(), 5)}, TEXT, "caption_from_iptc"),
    "ImageDescription": ({"exif": exif({0x010E: LATIN})}, LATIN, "caption_from_exif"),
    "ImageDescription in UTF-8": ({"exif": exif({0x010E: TEXT.encode()})}, TEXT, "caption_from_exif"),
    "XPComment": ({"exif": exif({0x9C9C: (TEXT + "\0").encode("utf-16-le")})}, TEXT, "caption_from_exif"),
    "XPTitle": ({"exif": exif({0x9C9B: (TEXT + "\0").encode("utf-16-le")})}, TEXT, "caption_from_exif"),
    "ASCII": ({"exif": exif(comment=b"ASCII\0\0\0" + LATIN.encode() + b"\0\0")}, LATIN, "caption_from_exif"),
    "little endian": ({"exif": exif(comment=b"UNICODE\0" + LATIN.encode("utf-16-le"))}, LATIN, "caption_from_exif"),
    "big endian": ({"exif": exif(comment=b"UNICODE\0" + LATIN.encode("utf-16-be"))}, LATIN, "caption_from_exif"),
    "a mark": ({"exif": exif(comment=b"UNICODE\0\xfe\xff" + TEXT.encode("utf-16-be"))}, TEXT, "caption_from_exif"),
    "JIS": ({"exif": exif(comment=b"JIS\0\0\0\0\0" + "赤い扉".encode("iso2022_jp"))}, "赤い扉", "caption_from_exif"),
    "undefined": ({"exif": exif(comment=bytes(8) + TEXT.encode())}, TEXT, "caption_from_exif"),
    "no prefix": ({"exif": exif(comment=TEXT.encode())}, TEXT, "caption_from_exif"),
}  # fmt: skip


def outcome(path: str) -> PhotoCaption | str | None:
    """The caption, or the reason why there is none."""
    try:
        return photo_caption(path)
    except Fault as fault:
        return fault.reason


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_and_encoding(tmp_path: Path, name: str) -> None:
    given, text, note = FIELDS[name]
    assert photo_caption(photo(tmp_path / "a.jpg", **given)) == (text, note)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_every_format_of_images(tmp_path: Path, suffix: str) -> None:
    assert photo_caption(photo(tmp_path / f"a{suffix}", exif=exif({0x010E: LATIN}))) == (LATIN, "caption_from_exif")
    if suffix != ".tif":  # Pillow writes none there
        assert photo_caption(photo(tmp_path / f"b{suffix}", xmp=xmp(TEXT))) == (TEXT, "caption_from_xmp")
    assert photo_caption(photo(tmp_path / f"c{suffix}")) is None


def test_the_order_of_the_fields(tmp_path: Path) -> None:
    """Each field wins where all before it are missing or a camera's."""
    tags = {0x010E: "EXIF", 0x9C9C: "comment".encode("utf-16-le"), 0x9C9B: "title".encode("utf-16-le")}
    block = exif(tags, b"ASCII\0\0\0user")
    both = {"xmp": XMP.format(ALT.format("description", "de", "x", "x-default", "XMP", "description")).encode()}
    found = [photo_caption(photo(tmp_path / "a.jpg", iptc(b"IPTC"), exif=block, **both))]
    both["xmp"] = xmp("default")
    found.append(photo_caption(photo(tmp_path / "a.jpg", iptc(b"IPTC"), exif=block, **both)))
    for tag in (None, 0x010E, 0x9C9C, 0x9286):
        if tag == 0x9286:
            del block.get_ifd(ExifTags.IFD.Exif)[tag]
        elif tag:
            block[tag] = "SONY DSC" if tag == 0x010E else b""
        found.append(photo_caption(photo(tmp_path / "a.jpg", iptc(b"  "), exif=block, **both)))
    assert [each and each.text for each in found] == ["XMP", "IPTC", "EXIF", "comment", "user", "title"]


def test_languages_of_xmp(tmp_path: Path) -> None:
    two = XMP.format(ALT.format("description", "de", "zuerst", "en", "second", "description")).encode()
    assert photo_caption(photo(tmp_path / "a.jpg", xmp=two)) == ("zuerst", "caption_from_xmp")
    plain = XMP.format("<dc:description>plain &amp; simple</dc:description>").encode()
    assert photo_caption(photo(tmp_path / "a.jpg", xmp=plain)) == ("plain & simple", "caption_from_xmp")


CAMERAS = [
    *("OLYMPUS DIGITAL CAMERA", "SONY DSC", "Exif_JPEG_PICTURE", "default", "KONICA MINOLTA DIGITAL CAMERA"),
    *("SAMSUNG CAMERA PICTURES", "DIGITAL CAMERA", " olympus digital camera  "),
]
PROGRAMS = [
    "dav", "Screenshot", "filter: 0; fileterIntensity: 0.0; ", '{"a": 1}', "Processed with VSCO with a6 preset",
]  # fmt: skip


@pytest.mark.parametrize("text", CAMERAS + PROGRAMS)
def test_texts_of_cameras_are_refused(tmp_path: Path, text: str) -> None:
    path = photo(tmp_path / "a.jpg", exif=exif({0x010E: text}))
    assert outcome(path) == "caption_of_camera"


def test_texts_of_cameras_are_refused_wherever_captions_come_from() -> None:
    for text in CAMERAS:
        with pytest.raises(Fault) as error:
            check_caption(text, CheckArguments())
        assert error.value.reason == "caption_of_camera"
    for text in ("a digital camera on a table", "Sony DSC with its lens", "my default mug"):
        assert check_caption(text, CheckArguments()) == (text, ())


# -- hostile and damaged ------------------------------------------------------------------------------------------------


def test_entities_are_not_expanded(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for declared in (
        f'<!ENTITY x SYSTEM "file://{tmp_path}/secret">',
        '<!ENTITY a "lol"><!ENTITY x "' + "&a;" * 10_000 + '">',
    ):
        content = f"<!DOCTYPE r [{declared}]>" + XMP.partition("?>")[2].partition("<?")[0]
        content = content.format("<dc:description>&x;</dc:description>")
        for coded in (content.encode(), content.encode("utf-16")):
            assert outcome(photo(tmp_path / "a.jpg", xmp=coded)) in (None, "bad_encoding")


def test_texts_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = photo(tmp_path / "a.jpg", exif=exif({0x010E: "Café".encode("latin-1")}))
    with pytest.raises(Fault, match="bad_encoding: caption_from_exif: not utf-8"):
        photo_caption(path)
    path = photo(
        tmp_path / "a.jpg", exif=exif({0x010E: "Café".encode("latin-1"), 0x9C9C: "a cup".encode("utf-16-le")})
    )
    assert photo_caption(path) == ("a cup", "caption_from_exif")


def test_damaged_metadata_count_as_none(tmp_path: Path) -> None:
    whole = Path(
        photo(tmp_path / "a.jpg", iptc(TEXT.encode()), exif=exif({0x010E: LATIN}, b"ASCII\0\0\0x"), xmp=xmp(TEXT))
    )
    content = whole.read_bytes()
    end = content.index(b"\xff\xdb")
    for at in range(2, end, 11):
        broken = bytearray(content)
        broken[at] ^= 0xFF
        whole.write_bytes(broken)
        found = outcome(str(whole))
        assert isinstance(found, PhotoCaption) or found in (None, "bad_encoding")
    for deep in (b"<a>" * 100_000, b"<a>" * 100_000 + b"</a>" * 100_000):
        assert photo_caption(photo(tmp_path / "b.webp", xmp=deep)) is None


def test_no_pixel_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [photo(tmp_path / f"a{suffix}", exif=exif({0x010E: LATIN})) for suffix in (".jpg", ".png", ".tif")]
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("it was decoded"))
    assert [photo_caption(path) for path in paths] == [(LATIN, "caption_from_exif")] * 3


def test_files_that_are_no_photos(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    assert outcome(str(tmp_path / "pipe.jpg")) == "not_a_file"
    with open(tmp_path / "large.jpg", "wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert photo_caption(str(tmp_path / "large.jpg")) is None
    assert photo_caption(str(write(tmp_path / "text.jpg", "no image"))) is None


# -- folders ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """Photos with captions in their metadata, one with a text file, one without any, one with a camera's."""
    folder = tmp_path / "album"
    folder.mkdir()
    photo(folder / "a.jpg", xmp=xmp("from XMP"), colour=10)
    photo(folder / "b.jpg", iptc(b"from IPTC"), colour=60)
    photo(folder / "c.png", exif=exif({0x010E: "from EXIF"}), colour=110)
    photo(folder / "d.jpg", exif=exif({0x010E: "OLYMPUS DIGITAL CAMERA"}), colour=160)
    photo(folder / "e.jpg", colour=200)
    return folder


def test_a_folder_of_captioned_photos_is_recognised(album: Path) -> None:
    good, bad = read(album)
    assert {record.id: (record.captions, record.notes) for record in good} == {
        "a.jpg": (["from XMP"], ("caption_from_xmp",)),
        "b.jpg": (["from IPTC"], ("caption_from_iptc",)),
        "c.png": (["from EXIF"], ("caption_from_exif",)),
    }
    assert reasons(bad) == [("file d.jpg", "caption_of_camera"), ("file e.jpg", "unmatched_image")]


def test_files_of_captions_come_first(album: Path) -> None:
    write(album / "a.txt", "from a text file")
    good, _ = read(album)
    assert good[0].captions == ["from a text file"]
    assert good[0].notes == ()
    write(album / "metadata.csv", "file_name,text\nb.jpg,from a table\n")
    assert [record.captions for record in read(album)[0]] == [["from a table"]]


def test_folders_of_splits_and_of_classes(album: Path) -> None:
    for split in ("train", "val"):
        (album.parent / "set" / split).mkdir(parents=True)
        photo(album.parent / "set" / split / "a.jpg", xmp=xmp(f"in {split}"))
    good, _ = read(album.parent / "set")
    assert [(record.captions, record.split) for record in good] == [
        (["in train"], "train"),
        (["in val"], "validation"),
    ]
    (album.parent / "set" / "train").rename(album.parent / "set" / "cats")
    assert read(album.parent / "set")[0][0].captions[0] == "a photo of a cats."
    assert read(album.parent / "set", format="imagefolder")[0][0].captions == ["in train"]


def test_a_link_that_leads_out_is_not_read(album: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.jpg").symlink_to(album / "a.jpg")
    with pytest.raises(ValueError, match="not recognised"):
        read(tmp_path / "links")
    good, bad = read(tmp_path / "links", format="imagefolder")
    assert (good, reasons(bad)) == ([], [("file a.jpg", "outside_root")])


def test_prepared_data_say_where_captions_came_from(album: Path, tmp_path: Path) -> None:
    prepare_data.main(
        [
            "--sources", str(album), "--output_dir", str(tmp_path / "out"), "--max_bad_fraction", "0.5", "--num_proc",
            "1",
        ]
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    notes = {name: count for name, count in report["notes"].items() if name.startswith("caption_from")}
    assert notes == {"caption_from_xmp": 1, "caption_from_iptc": 1, "caption_from_exif": 1}
    lost = [json.loads(line)["reason"] for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(lost) == ["caption_of_camera", "unmatched_image"]
    assert "The photo's own XMP data has the caption." in (tmp_path / "out" / "report.md").read_text()


def test_training_reads_them_too(album: Path, own_cache: Path) -> None:
    pairs = load_pairs(DataArguments(dataset_dir=str(album)), hold_out=False)
    assert [row["captions"] for row in pairs["train"]] == [["from XMP"], ["from IPTC"], ["from EXIF"]]
