"""The official arrays of corrupted images: read by severity, and told where they are damaged."""

import numpy as np
import pytest
import torch

from peerbayes.data import load_corrupted
from peerbayes.errors import InputError


@pytest.fixture
def folder(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "fog.npy", values)
    np.save(tmp_path / "labels.npy", np.tile(np.array([3, 1, 0, 2]), 5))
    return tmp_path


def test_official_arrays_are_split_by_severity_and_stay_in_their_file(folder):
    values = torch.from_numpy(np.load(folder / "fog.npy")).permute(0, 3, 1, 2)
    for severity in range(1, 6):
        split = load_corrupted(folder, "fog", severity)
        assert len(split) == 4
        assert split.labels.tolist() == [3, 1, 0, 2]
        images, labels = split.batch(torch.tensor([2, 0]), torch.device("cpu"))
        assert torch.equal(images, values[4 * severity - 4 :][[2, 0]])
        assert labels.tolist() == [0, 3]
    mapped = np.lib.format.open_memmap(folder / "fog.npy", mode="r+")
    mapped[19, 0, 0, 0] ^= 255
    mapped.flush()
    assert int(split.images[19, 0, 0, 0]) == int(values[19, 0, 0, 0]) ^ 255  # read from the file, not from a copy


def test_damaged_and_missing_files_are_told(folder):
    with pytest.raises(InputError, match=r"snow\.npy: there is no such file; expected the official arrays"):
        load_corrupted(folder, "snow", 1)
    with pytest.raises(InputError, match="unknown corruption 'fogg'; did you mean 'fog'"):
        load_corrupted(folder, "fogg", 1)
    whole = (folder / "fog.npy").read_bytes()
    for damaged in (whole[:-7], whole[:20], b"", b"PK\x03\x04" + whole):
        (folder / "fog.npy").write_bytes(damaged)
        with pytest.raises(InputError, match=r"fog\.npy: cannot be read as an \.npy file"):
            load_corrupted(folder, "fog", 1)
    for wrong in (np.zeros((19, 32, 32, 3), np.uint8), np.zeros((20, 32, 32), np.uint8), np.zeros((5, 2, 2, 3))):
        np.save(folder / "fog.npy", wrong)
        with pytest.raises(InputError, match=r"expected uint8 images \(5n, H, W, 3\)"):
            load_corrupted(folder, "fog", 1)
    (folder / "fog.npy").write_bytes(whole)
    np.save(folder / "labels.npy", np.zeros(7, np.int64))
    with pytest.raises(InputError, match=r"labels\.npy: 7 labels for 20 images"):
        load_corrupted(folder, "fog", 1)
    (folder / "labels.npy").unlink()
    with pytest.raises(InputError, match=r"labels\.npy: there is no such file"):
        load_corrupted(folder, "fog", 1)
