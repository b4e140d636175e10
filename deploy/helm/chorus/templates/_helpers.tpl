{{- define "chorus.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "chorus.selector" -}}
app.kubernetes.io/name: chorus
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "chorus.labels" -}}
{{ include "chorus.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* The settings as a ConfigMap's data. Numbers of a values file are floats, which Helm writes as 1.048576e+06. */ -}}
{{- define "chorus.settings" -}}
{{- range $name, $value := .Values.settings }}
{{ $name }}: {{ if and (kindIs "float64" $value) (eq $value (floor $value)) }}{{ printf "%.0f" $value | quote }}{{ else }}{{ $value | quote }}{{ end }}
{{- end }}
{{- end -}}
