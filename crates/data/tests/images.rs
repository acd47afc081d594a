//! Image records to batches.

use std::sync::Arc;

use evenkeel_data::*;

const ORDER: OrderOptions = OrderOptions { seed: 2, shuffle: true, held_out_every: None, part: Subset::Train };

fn options(size: usize, augment: Option<Augment>) -> ImageOptions {
    ImageOptions { size, mean: vec![0.0; 3], deviation: vec![1.0 / 255.0; 3], augment, classes: 10 }
}

fn images(size: usize) -> Images {
    Images::new(options(size, None)).unwrap()
}

/// Red is x, green is y, blue is 7.
fn ramp(width: usize, height: usize) -> Vec<u8> {
    (0..height).flat_map(|y| (0..width).flat_map(move |x| [x as u8, y as u8, 7])).collect()
}

fn close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() < 1e-3, "{found} at {place}, expected {expected}");
    }
}

#[test]
fn an_image_of_the_right_size_is_only_turned_to_planes() {
    let pixels = images(4).pixels(4, 4, &ramp(4, 4), Cursor::default()).unwrap();
    let xs: Vec<f32> = (0..16).map(|place| (place % 4) as f32).collect();
    let ys: Vec<f32> = (0..16).map(|place| (place / 4) as f32).collect();
    close(&pixels, &[xs, ys, vec![7.0; 16]].concat());
}

#[test]
fn normalising_subtracts_the_mean_and_divides_by_the_deviation() {
    let options = ImageOptions { mean: vec![0.1, 0.2, 0.3], deviation: vec![0.5, 0.25, 2.0], ..options(1, None) };
    let pixels = Images::new(options).unwrap().pixels(1, 1, &[255, 0, 51], Cursor::default()).unwrap();
    close(&pixels, &[(1.0 - 0.1) / 0.5, -0.2 / 0.25, (0.2 - 0.3) / 2.0]);
}

/// Expected values as Pillow's BILINEAR gives them for one channel in floating point.
#[test]
fn resizing_is_bilinear_and_averages_where_it_shrinks() {
    // 2 → 4: pixel centres at 0.25, 0.75, 1.25, 1.75 between centres 0.5 and 1.5.
    let wide = images(4).pixels(2, 1, &[0, 0, 0, 100, 100, 100], Cursor::default()).unwrap();
    close(&wide[..4], &[0.0, 25.0, 75.0, 100.0]);
    // 4 → 2: triangles of half-width 2 about 1 and 3.
    let line: Vec<u8> = [10u8, 20, 40, 80].iter().flat_map(|&value| [value; 3]).collect();
    let narrow = images(2).pixels(4, 1, &line, Cursor::default()).unwrap();
    let left = (10.0 * 0.75 + 20.0 * 0.75 + 40.0 * 0.25) / 1.75;
    let right = (20.0 * 0.25 + 40.0 * 0.75 + 80.0 * 0.75) / 1.75;
    close(&narrow[..2], &[left, right]);
    let flat = images(5).pixels(13, 3, &[9; 13 * 3 * 3], Cursor::default()).unwrap();
    close(&flat, &[9.0; 75]);
}

#[test]
fn grey_models_get_one_plane() {
    let options = ImageOptions { mean: vec![0.0], deviation: vec![1.0 / 255.0], ..options(1, None) };
    let pixels = Images::new(options).unwrap().pixels(1, 1, &[100, 50, 200], Cursor::default()).unwrap();
    close(&pixels, &[29.9 + 29.35 + 22.8]);
}

#[test]
fn augmentation_flips_and_shifts_by_place_alone() {
    let size = 6;
    let augment = Augment { flip: true, shift: 2 };
    let images = Images::new(options(size, Some(augment))).unwrap();
    // No pixel is black, so that black is from outside.
    let picture: Vec<u8> = ramp(size, size).iter().map(|value| value + 1).collect();
    let at = |record| images.pixels(size, size, &picture, Cursor { record, ..Cursor::default() }).unwrap();
    assert_eq!(at(1), at(1));
    let (mut flips, mut shifts) = (0, std::collections::BTreeSet::new());
    for record in 0..400 {
        let red = &at(record)[..size * size];
        let row = red.chunks_exact(size).find(|row| row.iter().any(|&value| value > 0.5)).unwrap();
        let seen: Vec<(usize, f32)> = row.iter().copied().enumerate().filter(|(_, value)| *value > 0.5).collect();
        let flipped = seen[0].1 > seen[1].1;
        flips += usize::from(flipped);
        let black_rows = |rows: &mut dyn Iterator<Item = &[f32]>| {
            rows.take_while(|row| row.iter().all(|&value| value < 0.5)).count() as isize
        };
        let top = black_rows(&mut red.chunks_exact(size));
        let bottom = black_rows(&mut red.chunks_exact(size).rev());
        let (left, right) = (seen[0].0 as isize, (size - 1 - seen[seen.len() - 1].0) as isize);
        for (offset, value) in &seen {
            let source = if flipped { size as isize - value.round() as isize } else { value.round() as isize - 1 };
            assert_eq!(source + left - right, *offset as isize, "{seen:?}");
        }
        shifts.insert((top - bottom, left - right));
    }
    assert!((150..250).contains(&flips), "{flips} of 400");
    assert_eq!(shifts.len(), 25, "every shift by up to two pixels: {shifts:?}");
}

struct Pictures;

impl Source for Pictures {
    fn chunks(&self) -> usize {
        11
    }

    fn read(&self, chunk: usize) -> Result<Vec<Record>, evenkeel_store::Error> {
        let picture = |record: usize| {
            let (width, height) = (3 + record, 4 + chunk);
            Record::Image { width, height, rgb: ramp(width, height), label: (chunk + record) % 10 }
        };
        Ok((0..4).map(picture).collect())
    }
}

fn load(workers: usize, from: Option<DataPosition>) -> Vec<(ImageBatch, DataPosition)> {
    let images = Images::new(options(5, Some(Augment { flip: true, shift: 1 }))).unwrap();
    let options = LoaderOptions { order: ORDER, epochs: Some(2), workers, on_bad_record: OnBadRecord::Stop };
    let mut loader = Loader::images(Arc::new(Pictures), images, 7, options, from).unwrap();
    let mut batches = Vec::new();
    while let Some(batch) = loader.next().unwrap() {
        batches.push((batch, loader.state()));
    }
    batches
}

#[test]
fn batches_are_the_same_for_any_number_of_workers_and_from_any_state() {
    let straight = load(1, None);
    let counts: Vec<usize> = straight.iter().map(|(batch, _)| batch.labels.len()).collect();
    assert_eq!(counts, [[7; 12].as_slice(), &[4]].concat());
    assert!(straight.iter().all(|(batch, _)| batch.pixels.len() == batch.labels.len() * 75));
    assert_eq!(load(2, None), straight);
    assert_eq!(load(5, None), straight);
    for (index, (_, state)) in straight.iter().enumerate() {
        assert_eq!(load(index % 3 + 1, Some(*state)), straight[index + 1..], "after batch {index}");
    }
}

#[test]
fn bad_images_and_options_are_refused() {
    for (width, height, bytes) in [(2, 2, 11), (0, 4, 0), (usize::MAX, 2, 6), (1 << 20, 1 << 20, 3)] {
        let error = images(2).pixels(width, height, &vec![0; bytes], Cursor::default()).unwrap_err();
        assert!(matches!(error, Error::BadImage { .. }), "{error}");
    }
    let bad = [
        options(0, None),
        options(4, Some(Augment { flip: false, shift: 4 })),
        ImageOptions { mean: vec![0.0; 2], ..options(4, None) },
        ImageOptions { deviation: vec![0.0; 3], ..options(4, None) },
        ImageOptions { mean: vec![f32::NAN; 3], ..options(4, None) },
    ];
    for options in bad {
        assert!(matches!(Images::new(options), Err(Error::BadOption { .. })));
    }
    let few = Images::new(ImageOptions { classes: 3, ..options(4, None) }).unwrap();
    let options = LoaderOptions { order: ORDER, epochs: Some(1), workers: 1, on_bad_record: OnBadRecord::Stop };
    let error = Loader::images(Arc::new(Pictures), few, 2, options, None).unwrap().next().unwrap_err().to_string();
    assert!(error.contains("the model has 3 classes"), "{error}");
}
