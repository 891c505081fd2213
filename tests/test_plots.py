"""What all pictures have in common. test_records.py has the committed ones of a track."""

from xml.etree import ElementTree

from matplotlib import rc_context

from claims.pages import write_picture


def test_a_picture_has_a_light_ground_a_dark_mode_and_the_same_bytes_again(tmp_path):
    path = tmp_path / "line.svg"

    def write():
        write_picture(path, (4, 3), lambda figure: figure.subplots().plot([0, 1], label="a"))
        return path.read_text()

    before = write()
    style = ElementTree.fromstring(before).find(".//{*}style").text
    assert "@media (prefers-color-scheme: dark) {svg {filter: invert(" in style
    assert 'style="fill: #ffffff"' in before.partition('id="axes_1"')[0]
    with rc_context({"font.size": 20, "svg.hashsalt": None, "savefig.transparent": True}):
        assert write() == before
