//! Images in folders and in CIFAR-10's files.

mod forge;

use std::fs;
use std::path::Path;

use evenkeel_store::{Error, Format, Record, Source, SourceSpec};
use fastrand::Rng;
use forge::{folder, message};
use png::{BitDepth, ColorType};
use tempfile::TempDir;

fn png(width: u32, height: u32, color: ColorType, depth: BitDepth, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(color);
    encoder.set_depth(depth);
    if color == ColorType::Indexed {
        encoder.set_palette(vec![1, 2, 3, 4, 5, 6]);
    }
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(data).unwrap();
    writer.finish().unwrap();
    bytes
}

fn jpeg(width: u16, height: u16, color: jpeg_encoder::ColorType, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    jpeg_encoder::Encoder::new(&mut bytes, 100).encode(data, width, height, color).unwrap();
    bytes
}

/// Folders of classes with these images.
fn classes(images: &[(&str, &[u8])]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (path, bytes) in images {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    folder
}

fn open(path: &Path, format: Format) -> Result<Source, Error> {
    Source::open(&SourceSpec::new(format, [path]))
}

fn read_all(source: &Source) -> Result<Vec<Record>, Error> {
    let chunks: Result<Vec<_>, _> = (0..source.chunks()).map(|chunk| source.read(chunk)).collect();
    Ok(chunks?.concat())
}

fn image(width: usize, height: usize, rgb: &[u8], label: usize) -> Record {
    Record::Image { width, height, rgb: rgb.to_vec(), label }
}

#[test]
fn classes_are_folders_sorted_by_name() {
    let grey = |value: u8| png(1, 1, ColorType::Grayscale, BitDepth::Eight, &[value]);
    let (one, two, three, four) = (grey(1), grey(2), grey(3), grey(4));
    let folder = classes(&[
        ("dog/b.png", &two),
        ("dog/a.PNG", &one),
        ("cat/z.jpeg", &three),
        ("ant/readme.txt", b"no images yet"),
        ("cat/.hidden.png", b""),
        (".git/x.png", b""),
        ("readme.png", b""),
    ]);
    let more = classes(&[("dog/c.png", &four)]);
    let spec = SourceSpec::new(Format::Images, [folder.path(), more.path()]);
    let source = Source::open(&spec).unwrap();
    assert_eq!(source.classes(), ["ant", "cat", "dog"]);
    let expected = [(3, 1), (1, 2), (2, 2), (4, 2)].map(|(grey, label)| image(1, 1, &[grey; 3], label));
    assert_eq!(read_all(&source).unwrap(), expected);
    assert_eq!(source.origin(0, 1).unwrap().to_string(), format!("`{}`", folder.path().join("dog/a.PNG").display()));
}

#[test]
fn many_images_are_several_chunks() {
    let images: Vec<(String, Vec<u8>)> =
        (0..20).map(|i| (format!("a/{i:02}.png"), png(1, 1, ColorType::Rgb, BitDepth::Eight, &[i, 0, 255]))).collect();
    let images: Vec<(&str, &[u8])> = images.iter().map(|(name, bytes)| (name.as_str(), &bytes[..])).collect();
    let folder = classes(&images);
    let source = open(folder.path(), Format::Images).unwrap();
    assert!(source.chunks() > 1);
    let expected: Vec<Record> = (0..20).map(|i| image(1, 1, &[i, 0, 255], 0)).collect();
    assert_eq!(read_all(&source).unwrap(), expected);
}

#[test]
fn every_kind_of_png_becomes_red_green_and_blue() {
    use BitDepth::{Eight, One, Sixteen};
    let cases: [(ColorType, BitDepth, &[u8], [u8; 6]); 8] = [
        (ColorType::Rgb, Eight, &[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
        (ColorType::Rgb, Sixteen, &[1, 9, 2, 9, 3, 9, 4, 9, 5, 9, 6, 9], [1, 2, 3, 4, 5, 6]),
        (ColorType::Rgba, Eight, &[1, 2, 3, 0, 4, 5, 6, 255], [1, 2, 3, 4, 5, 6]),
        (ColorType::Grayscale, Eight, &[7, 8], [7, 7, 7, 8, 8, 8]),
        (ColorType::Grayscale, One, &[0b0100_0000], [0, 0, 0, 255, 255, 255]),
        (ColorType::Grayscale, Sixteen, &[7, 0, 8, 0], [7, 7, 7, 8, 8, 8]),
        (ColorType::GrayscaleAlpha, Eight, &[7, 0, 8, 0], [7, 7, 7, 8, 8, 8]),
        (ColorType::Indexed, One, &[0b0100_0000], [1, 2, 3, 4, 5, 6]),
    ];
    for (color, depth, data, expected) in cases {
        let folder = classes(&[("a/a.png", &png(2, 1, color, depth, data))]);
        let found = read_all(&open(folder.path(), Format::Images).unwrap()).unwrap();
        assert_eq!(found, [image(2, 1, &expected, 0)], "{color:?} {depth:?}");
    }
}

#[test]
fn jpegs_come_back_nearly_as_they_were() {
    use jpeg_encoder::ColorType::{Luma, Rgb};
    let (width, height) = (19u16, 11u16);
    let gradient = |x: u16, y: u16| [(x * 12) as u8, (y * 20) as u8, (x * 5 + y * 5) as u8];
    let pixels = (0..height).flat_map(|y| (0..width).map(move |x| gradient(x, y)));
    let rgb: Vec<u8> = pixels.clone().flatten().collect();
    let red: Vec<u8> = pixels.map(|[red, ..]| red).collect();
    let grey: Vec<u8> = red.iter().flat_map(|&red| [red; 3]).collect();
    for (bytes, expected) in [(jpeg(width, height, Rgb, &rgb), &rgb), (jpeg(width, height, Luma, &red), &grey)] {
        // Its name may say otherwise.
        let folder = classes(&[("a/a.png", &bytes)]);
        let found = read_all(&open(folder.path(), Format::Images).unwrap()).unwrap();
        let [Record::Image { width: 19, height: 11, rgb: found, label: 0 }] = &found[..] else { panic!("{found:?}") };
        let worst = found.iter().zip(expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        assert!(found.len() == expected.len() && worst <= 6, "off by {worst}");
    }
}

/// A PNG that claims a size and has next to nothing.
fn bomb(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = png(1, 1, ColorType::Rgb, BitDepth::Eight, &[0; 3]);
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    let checksum = crc32(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&checksum.to_be_bytes());
    bytes
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

#[test]
fn what_is_no_image_says_why() {
    let wide = jpeg(65_000, 1, jpeg_encoder::ColorType::Luma, &[0; 65_000]);
    let mut tall = wide.clone();
    let frame = tall.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    tall[frame + 5..frame + 7].copy_from_slice(&60_000u16.to_be_bytes());
    let cases: [(&[u8], &str); 6] = [
        (b"", "is not an image that can be read: it is neither PNG nor JPEG"),
        (b"GIF89a", "is not an image that can be read: it is neither PNG nor JPEG"),
        (b"\x89PNG\r\n\x1a\nIHDR", "is not an image that can be read: "),
        (b"\xff\xd8\xff\xe0", "is not an image that can be read: "),
        (&bomb(100_000, 100_000), "is an image of 100000 × 100000 pixels, the limit is 67108864"),
        (&tall, "is an image of 65000 × 60000 pixels, the limit is 67108864"),
    ];
    for (bytes, expected) in cases {
        let folder = classes(&[("a/a.png", bytes)]);
        let error = read_all(&open(folder.path(), Format::Images).unwrap()).unwrap_err();
        let found = message(&error, folder.path());
        assert!(found.starts_with(&format!("`a/a.png`: {expected}")), "{found}");
    }
    let folder = classes(&[("a/a.png", &[0; 100])]);
    let spec = SourceSpec { record_bytes: 99, ..SourceSpec::new(Format::Images, [folder.path()]) };
    let error = Source::open(&spec).unwrap().read(0).unwrap_err();
    assert_eq!(message(&error, folder.path()), "`a/a.png`: is 100 bytes long, the limit is 99");
}

#[test]
fn a_folder_without_classes_is_refused() {
    let folder = classes(&[("a.png", b""), ("empty/readme.txt", b"")]);
    let said = |path: &Path| message(&open(path, Format::Images).err().unwrap(), folder.path());
    let nothing = format!("`{}`: has no data: no folder with *.png, *.jpg or *.jpeg in it", folder.path().display());
    assert_eq!(said(folder.path()), nothing);
    assert_eq!(said(&folder.path().join("a.png")), "`a.png`: is not a folder, but stands where one must be");
    assert_eq!(said(&folder.path().join("b")), "`b`: does not exist");
}

#[test]
fn damaged_images_are_refused_or_read_and_never_end_the_run() {
    let mut rng = Rng::with_seed(10);
    let pixels: Vec<u8> = (0..40 * 30 * 3).map(|_| rng.u8(..)).collect();
    let originals = [
        png(40, 30, ColorType::Rgb, BitDepth::Eight, &pixels),
        png(40, 30, ColorType::Indexed, BitDepth::One, &pixels[..5 * 30]),
        jpeg(40, 30, jpeg_encoder::ColorType::Rgb, &pixels),
    ];
    let folder = classes(&[("a/a.png", b"")]);
    let source = open(folder.path(), Format::Images).unwrap();
    let mut accepted = 0;
    for round in 0..3000 {
        let mut bytes = originals[round % 3].clone();
        for _ in 0..rng.usize(1..5) {
            // The headers are at the front.
            let at = if rng.bool() { rng.usize(..bytes.len().min(300)) } else { rng.usize(..bytes.len()) };
            bytes[at] = rng.u8(..);
        }
        if rng.u8(..8) == 0 {
            bytes.truncate(rng.usize(..bytes.len()));
        }
        fs::write(folder.path().join("a/a.png"), &bytes).unwrap();
        accepted += usize::from(source.read(0).is_ok());
    }
    assert!((50..2900).contains(&accepted), "{accepted} accepted");
}

#[test]
fn cifar_images_are_interleaved() {
    let image_of = |label: u8, seed: u8| -> Vec<u8> {
        let planes = (0..3u8).flat_map(|plane| (0..1024u16).map(move |pixel| (pixel as u8) ^ seed ^ (plane * 77)));
        [label].into_iter().chain(planes).collect()
    };
    let batch =
        |first: u8, count: u8| -> Vec<u8> { (first..first + count).flat_map(|i| image_of(i % 10, i)).collect() };
    let folder = folder(&[
        ("data_batch_2.bin", &batch(50, 3)),
        ("data_batch_1.bin", &batch(1, 7)),
        ("test_batch.bin", &batch(99, 1)),
        ("batches.meta.txt", b""),
    ]);
    let pixels = |seed: u8| -> Vec<u8> {
        (0..1024u16).flat_map(|pixel| [0, 77, 154].map(|plane: u8| (pixel as u8) ^ seed ^ plane)).collect()
    };
    let expected: Vec<Record> = (1..8).chain(50..53).map(|i| image(32, 32, &pixels(i), usize::from(i % 10))).collect();
    for (chunk_bytes, chunks) in [(1, 10), (3073, 10), (3073 * 3 + 5, 4), (1 << 20, 2), (u64::MAX, 2)] {
        let spec = SourceSpec { chunk_bytes, ..SourceSpec::new(Format::Cifar10, [folder.path()]) };
        let source = Source::open(&spec).unwrap();
        assert_eq!(source.chunks(), chunks);
        assert_eq!(read_all(&source).unwrap(), expected);
    }
    let test = open(&folder.path().join("test_batch.bin"), Format::Cifar10).unwrap();
    assert_eq!(read_all(&test).unwrap(), [image(32, 32, &pixels(99), 9)]);
    assert_eq!((test.classes().len(), test.classes()[9].as_str()), (10, "truck"));
}

#[test]
fn cifar_files_of_another_size_or_label_are_refused() {
    let said = |bytes: &[u8]| {
        let folder = folder(&[("test_batch.bin", bytes)]);
        let read = open(&folder.path().join("test_batch.bin"), Format::Cifar10).and_then(|source| read_all(&source));
        message(&read.unwrap_err(), folder.path())
    };
    let size = "expected a multiple of 3073, the size of an image and its label";
    assert_eq!(said(&[0; 3072]), format!("`test_batch.bin`: is 3072 bytes long, {size}"));
    assert_eq!(said(&[]), format!("`test_batch.bin`: is 0 bytes long, {size}"));
    let mut two = vec![0; 2 * 3073];
    two[3073] = 10;
    assert_eq!(said(&two), "`test_batch.bin`: row 2 has label 10, expected 0 to 9");
}
