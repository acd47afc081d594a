//! Numbers and tables in a form for people.

use std::time::Duration;

/// `1.5 GiB`
pub fn bytes(count: u64) -> String {
    scaled(count as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// `1536 MiB`: for sums with parts to compare.
pub fn mib(bytes: u64) -> String {
    format!("{} MiB", in_mib(bytes))
}

/// Rounded to the nearest.
pub fn in_mib(bytes: u64) -> u64 {
    (bytes + (1 << 19)) >> 20
}

/// `13.9 M`
pub fn count(count: u64) -> String {
    scaled(count as f64, 1000.0, &["", "K", "M", "B", "T"])
}

/// `1 core`, `2 cores`
pub fn cores(count: usize) -> String {
    counted(count, "core", "cores")
}

/// `1 number`, `2 numbers`
pub fn counted(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// `1.50 TFLOP`
pub fn flops(count: u128) -> String {
    scaled(count as f64, 1000.0, &["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"])
}

/// `1h 02m`, the two largest units.
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m {:02}s", seconds % 60),
        3600..86400 => format!("{hours}h {:02}m", minutes % 60),
        _ => format!("{days}d {:02}h", hours % 24),
    }
}

/// `45.60 ms`, with more digits for less.
pub fn milliseconds(seconds: f64) -> String {
    // Rounded before the comparison, or 9.9999 would be written as 10.000. Sums that should cancel may leave a negative zero;
    // adding zero removes its sign.
    let value = (seconds * 1e6).round() / 1e3 + 0.0;
    let decimals = match value.abs() {
        size if size < 10.0 => 3,
        size if size < 100.0 => 2,
        _ => 1,
    };
    format!("{value:.decimals$} ms")
}

/// `41.4%`
pub fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

fn scaled(mut value: f64, base: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= base && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let digits = if unit == 0 { 0 } else { 1 };
    format!("{value:.digits$} {}", units[unit]).trim_end().to_owned()
}

/// A table with aligned columns: the first to the left, the others to the right.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let cells = cells.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(header.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        let cases = [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")];
        for (value, expected) in cases {
            assert_eq!(bytes(value), expected);
        }
        assert_eq!(count(13_900_000), "13.9 M");
        assert_eq!(count(7), "7");
        assert_eq!([1, 2].map(cores), ["1 core", "2 cores"]);
        assert_eq!(flops(1_540_000_000_000), "1.5 TFLOP");
    }

    #[test]
    fn durations_have_their_two_largest_units() {
        let cases = [(0, "0s"), (59, "59s"), (60, "1m 00s"), (3599, "59m 59s"), (3720, "1h 02m"), (90_000, "1d 01h")];
        for (seconds, expected) in cases {
            assert_eq!(duration(Duration::from_secs(seconds)), expected);
        }
        assert_eq!(percent(0.4142), "41.4%");
    }

    #[test]
    fn times_have_the_decimals_they_need() {
        let cases = [
            (0.0, "0.000 ms"),
            (-1e-18, "0.000 ms"),
            (0.001_234_6, "1.235 ms"),
            (0.009_999_999_9, "10.00 ms"),
            (0.0456, "45.60 ms"),
            (1.5, "1500.0 ms"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(milliseconds(seconds), expected, "{seconds}");
        }
    }

    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["a".into(), "10".into()], vec!["long".into(), "9".into()]];
        assert_eq!(table(&["name", "n"], &rows), "name   n\na     10\nlong   9");
    }
}
