//! Chat templates that ask for more memory than any machine has. One test, because it watches the process's whole memory.

mod chat;

use chat::{config, messages};
use evenkeel_data::{Error, Template};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

#[test]
fn a_template_that_makes_too_much_ends_with_an_error_and_not_with_the_memory() {
    const MOST_BYTES: usize = 1 << 30;
    let sound =
        "{{ 2 * 3 * 4 }} {{ 'ab' * 2 }} {{ 8 / 2 * 3 }} {{ 2 * 3 ** 2 }} {{ [1, 'x'] * 2 }} {{ 1.5 * 2 }} ** '*'";
    let text = Template::new(sound, &config(), 0).unwrap().render(&messages(&[("user", "hi")]), false).unwrap();
    assert_eq!(text, "24 abab 12.0 18 [1, 'x', 1, 'x'] 3.0 ** '*'");
    let forty = |doubling: &str| format!("{{% set s = 'lots of text' %}}{}{{{{ s | length }}}}", doubling.repeat(40));
    let looped = |doubling: &str| {
        let loops = "{% set ns = namespace(s='lots of text', l=[1]) %}{% for i in range(40) %}BODY{% endfor %}{{ ns.s | length }}";
        loops.replace("BODY", doubling)
    };
    let wide = "w".repeat(500_000);
    let bombs = [
        forty("{% set s = s ~ s %}"),
        forty("{% set s = s + s %}"),
        forty("{% set s = [s, s] | join %}"),
        forty("{% set s = ''.join([s, s]) %}"),
        forty("{% set s = s | replace('t', s) %}"),
        forty("{% set s = s.replace('t', s) %}"),
        forty("{% set s = '%s%s' | format(s, s) %}"),
        forty("{% set s %}{{ s }}{{ s }}{% endset %}"),
        looped("{% set ns.s = ns.s ~ ns.s %}"),
        looped("{% set ns.l = ns.l + ns.l %}{% set ns.s = ns.l | list %}"),
        "{% macro m(x, n) %}{% if n %}{{ m(x ~ x, n - 1) }}{% endif %}{% endmacro %}{{ m('text', 40) }}".to_owned(),
        // A list of a thousand texts of ten megabytes, all the same, printed into one.
        "{% set s = 'x' * 10000000 %}{% set l = [s] * 1000 %}{{ (l ~ '') | length }}".to_owned(),
        "{% set s = 'x' * 10000000 %}{% set l = [s] * 1000 %}{{ l }}".to_owned(),
        "{% set s = 'x' * 10000000 %}{% set l = [s] * 1000 %}{{ l | string | length }}".to_owned(),
        // And of different ones.
        "{% set ns = namespace(l=[]) %}{% set s = 'x' * 10000000 %}{% for i in range(20000) %}\
         {% set ns.l = ns.l + [s ~ i] %}{% endfor %}"
            .to_owned(),
        "{% set l = [1] * 99999999 %}".to_owned(),
        "{% set l = (1,) * 1000 * 1000 * 1000 %}".to_owned(),
        "{% set l = ['x' * 99999999, 'x' * 99999999] %}".to_owned(),
        "{{ [1] | batch(999999999, 'x') | list | length }}".to_owned(),
        "{{ 'a\nb' | indent(999999999) }}".to_owned(),
        format!("{{% set s %}}{{% for i in range(90000) %}}{wide}{{% endfor %}}{{% endset %}}"),
    ];
    let asked = messages(&[("user", "hi")]);
    for bomb in bombs {
        let shown: String = bomb.chars().take(120).collect();
        ALLOCATOR.reset_peak_usage();
        let before = ALLOCATOR.current_usage();
        let rendered = Template::new(&bomb, &config(), 0).and_then(|template| template.render(&asked, false));
        let peak = ALLOCATOR.peak_usage().saturating_sub(before);
        let error = rendered.err().unwrap_or_else(|| panic!("rendered: {shown}"));
        let is_clear =
            matches!(error, Error::TemplateOutput { .. } | Error::TemplateEndless { .. } | Error::BadTemplate { .. });
        assert!(is_clear, "{error}: {shown}");
        assert!(peak < MOST_BYTES, "{peak} bytes, {error}: {shown}");
        println!("{:>5} MiB  {error}: {shown}", peak >> 20);
    }
    // The one that is asked for: it takes what is allowed of one text, and little more.
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    let doubling = Template::new(&forty("{% set s = s ~ s %}"), &config(), 0).unwrap();
    let error = doubling.render(&asked, false).unwrap_err().to_string();
    assert_eq!(error, "the chat template makes more than 16777216 bytes of text");
    assert!(ALLOCATOR.peak_usage() - before < 64 << 20, "{} bytes", ALLOCATOR.peak_usage() - before);
}
